"""A variational autoencoder of token sequences: the continuous latent in which a flow of molecules lives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cameraready.flows._molecules.drugs import END, PAD


class SequenceAutoencoder(nn.Module):
    """Codes (B, L) to latents (B, D) and back; a recurrent encoder and decoder, and a head that reads properties.

    The head makes nearby latents alike in what matters (Gomez-Bombarelli et al., 2018); without it a surrogate of a property
    would have to fit a function that jumps at every token.

    Parameters
    ----------
    vocabulary, length : int
        Tokens known, and tokens of a row.
    latent : int
        D.
    hidden, embedding : int
        Widths; the decoder has `hidden`, the encoder half of it in each direction.
    properties : int
        Standardised properties that the head predicts.
    """

    def __init__(
        self, vocabulary: int, length: int, *, latent: int = 48, hidden: int = 256, embedding: int = 48, properties: int = 6
    ) -> None:
        super().__init__()
        self.vocabulary, self.length, self.latent = vocabulary, length, latent
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PAD)
        self.encoder = nn.GRU(embedding, hidden // 2, batch_first=True, bidirectional=True)
        self.to_latent = nn.Linear(hidden, 2 * latent)
        self.begin = nn.Linear(latent, hidden)
        self.decoder = nn.GRU(embedding + latent, hidden, batch_first=True)
        self.to_token = nn.Linear(hidden, vocabulary)
        self.head = nn.Sequential(nn.Linear(latent, 128), nn.SiLU(), nn.Linear(128, properties))
        self.register_buffer("centre", torch.zeros(latent))
        self.register_buffer("spread", torch.ones(latent))

    def posterior(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance (B, D) of the latent of codes (B, L)."""
        states, _ = self.encoder(self.embedding(codes))
        real = (codes != PAD)[..., None].to(states)
        pooled = (states * real).sum(1) / real.sum(1).clamp_min(1)
        mean, log_variance = self.to_latent(pooled).chunk(2, -1)
        return mean, log_variance.clamp(-8.0, 2.0)

    def logits(self, latent: Tensor, codes: Tensor) -> Tensor:
        """(B, L, V): of each token given those before it (0, PAD, stands for the beginning and for a hidden token)."""
        before = functional.pad(codes[:, :-1], (1, 0), value=PAD)
        known = latent[:, None].expand(-1, codes.shape[1], -1)
        states, _ = self.decoder(torch.cat([self.embedding(before), known], -1), torch.tanh(self.begin(latent))[None])
        return self.to_token(states)

    def loss(
        self, codes: Tensor, targets: Tensor, properties: Tensor, *, kl: float, hide: float, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy per molecule + `kl` KL + squared error of the properties; `hide` is the share of tokens not shown."""
        mean, log_variance = self.posterior(codes)
        latent = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator)
        hidden = torch.rand(targets.shape, generator=generator) < hide
        logits = self.logits(latent, targets.masked_fill(hidden, PAD)) if hide else self.logits(latent, targets)
        words = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD, reduction="sum") / len(codes)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum() / (2 * len(codes))
        error = (self.head(latent) - properties).square().sum() / len(codes)
        return words + kl * divergence + error, {
            "words": float(words.detach()), "kl": float(divergence.detach()), "properties": float(error.detach()),
        }

    @torch.no_grad()
    def write(self, latent: Tensor) -> Tensor:
        """Codes (B, L) of the likeliest next token, one after another; a function of the latent alone."""
        state = torch.tanh(self.begin(latent))[None]
        token = torch.full((len(latent),), PAD, dtype=torch.int64)
        done = torch.zeros(len(latent), dtype=torch.bool)
        rows = torch.full((len(latent), self.length), PAD, dtype=torch.int64)
        for at in range(self.length):
            step, state = self.decoder(torch.cat([self.embedding(token), latent], -1)[:, None], state)
            scores = self.to_token(step[:, 0])
            scores[:, PAD] = -torch.inf
            token = scores.argmax(-1)
            rows[:, at] = torch.where(done, PAD, token)
            done |= token == END
            if bool(done.all()):
                break
        return rows
