"""A variational autoencoder of rows of codes: the continuous latent in which a flow of molecules lives."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from cameraready.flows._molecules.drugs import END, PAD


class SequenceAutoencoder(nn.Module):
    """Codes (B, L) to latents (B, D) and back: a recurrent encoder, a recurrent decoder, and a head that reads properties off the latent.

    The head makes nearby latents alike in what matters (Gomez-Bombarelli et al., 2018, arXiv:1610.02415); without it a surrogate of a property would have to
    fit a function that jumps at every code. Latents that leave and enter through `read` and `write` are standardised over the drugs.

    Parameters
    ----------
    vocabulary, length : int
        Codes known, and codes of a row.
    latent : int
        D.
    hidden, embedding : int
        Widths; the decoder has `hidden` units, the encoder half of them in each direction.
    properties : int
        Standardised properties that the head predicts.
    generator : torch.Generator
        Of the initial weights.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        *,
        latent: int,
        hidden: int,
        embedding: int,
        properties: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.length, self.latent = length, latent
        with torch.random.fork_rng(devices=[]):  # torch's layers draw their first weights from the global generator
            self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=PAD)
            self.encoder = nn.GRU(embedding, hidden // 2, batch_first=True, bidirectional=True)
            self.to_latent = nn.Linear(2 * (hidden // 2), 2 * latent)
            self.begin = nn.Linear(latent, hidden)
            self.decoder = nn.GRU(embedding + latent, hidden, batch_first=True)
            self.to_code = nn.Linear(hidden, vocabulary)
            self.head = nn.Sequential(nn.Linear(latent, 128), nn.SiLU(), nn.Linear(128, properties))
        with torch.no_grad():
            for weight in self.parameters():
                fan = weight.shape[-1] if weight.dim() > 1 else hidden
                nn.init.uniform_(weight, -1 / math.sqrt(fan), 1 / math.sqrt(fan), generator=generator)
            self.embedding.weight.normal_(generator=generator)[PAD] = 0
        self.register_buffer("centre", torch.zeros(latent))
        self.register_buffer("spread", torch.ones(latent))

    def posterior(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (B, D) of the latent (not standardised) of codes (B, L)."""
        lengths = (codes != PAD).sum(1)
        packed = pack_padded_sequence(self.embedding(codes), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        mean, log_variance = self.to_latent(states.sum(1) / lengths[:, None]).chunk(2, -1)
        return mean, (log_variance.clamp(-8.0, 2.0) / 2).exp()

    def logits(self, latent: Tensor, codes: Tensor) -> Tensor:
        """(B, L, V): of each code, given the latent (not standardised) and the codes before it; PAD stands for the beginning and for a code not shown."""
        before = functional.pad(codes[:, :-1], (1, 0), value=PAD)
        known = latent[:, None].expand(-1, codes.shape[1], -1)
        states, _ = self.decoder(torch.cat([self.embedding(before), known], -1), torch.tanh(self.begin(latent))[None])
        return self.to_code(states)

    def loss(self, codes: Tensor, properties: Tensor, *, kl: float, hide: float, generator: torch.Generator) -> Tensor:
        """Nats per molecule + `kl` times the KL to N(0, I) + squared error of the properties (B, P); a share `hide` of the codes is not shown to the decoder."""
        mean, deviation = self.posterior(codes)
        latent = mean + deviation * torch.randn(mean.shape, generator=generator)
        shown = codes.masked_fill(torch.rand(codes.shape, generator=generator) < hide, PAD)
        logits = self.logits(latent, shown).transpose(1, 2)
        words = functional.cross_entropy(logits, codes, ignore_index=PAD, reduction="sum")
        divergence = (mean.square() + deviation.square() - 1 - 2 * deviation.log()).sum() / 2
        error = (self.head(latent) - properties).square().sum()
        return (words + kl * divergence + error) / len(codes)

    @torch.no_grad()
    def standardise(self, codes: Tensor) -> None:
        """Take centre and spread of the latents from those of codes (N, L): means, and the variance of the mixture of posteriors."""
        mean, deviation = self.posterior(codes)
        self.centre.copy_(mean.mean(0))
        self.spread.copy_((mean.var(0) + deviation.square().mean(0)).sqrt().clamp_min(1e-4))

    @torch.no_grad()
    def read(self, codes: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Standardised latents (B, D) of codes: the posterior's mean, or with a generator a draw from it."""
        mean, deviation = self.posterior(codes)
        if generator is not None:
            mean = mean + deviation * torch.randn(mean.shape, generator=generator)
        return (mean - self.centre) / self.spread

    @torch.no_grad()
    def write(self, latents: Tensor) -> Tensor:
        """Codes (B, L) of standardised latents: the likeliest next code, again and again, so a function of the latent alone."""
        latent = latents * self.spread + self.centre
        state = torch.tanh(self.begin(latent))[None]
        code = torch.full((len(latent),), PAD)
        rows = torch.full((len(latent), self.length), PAD)
        done = torch.zeros(len(latent), dtype=torch.bool)
        for at in range(self.length):
            step, state = self.decoder(torch.cat([self.embedding(code), latent], -1)[:, None], state)
            scores = self.to_code(step[:, 0])
            scores[:, PAD] = -torch.inf
            code = scores.argmax(-1)
            rows[:, at] = torch.where(done, PAD, code)
            done |= code == END
            if bool(done.all()):
                break
        return rows
