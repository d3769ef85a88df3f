"""Which prompts are how hard: a learned log-partition over the pool, and the running average that it has to beat."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class AccuracyEstimate(Protocol):
    """Anything that has an opinion on every prompt of a pool; what `PacedSampler` asks."""

    @property
    def n_prompts(self) -> int: ...

    def accuracy(self, prompt_ids: Tensor | None = None, *, clip: bool = True) -> Tensor: ...


class PartitionHead(nn.Module):
    """log Z(x) of every prompt x of a pool, by a 3-layer perceptron on fixed embeddings; ``beta * log Z(x)`` estimates the accuracy.

    The network's output is the expected reward p_hat, and ``log_z = p_hat / beta``: targets of size 1/beta = 20 would otherwise make it lag.
    It starts at `start` for every prompt, exactly.

    Parameters
    ----------
    embeddings : Tensor, shape (P, F), floating
        One row a prompt, computed once (`prompt_embeddings`); kept as a buffer, centred and scaled by the pool's mean and standard deviation.
        No gradient flows into the model that made them.
    hidden : int
        Width of the two hidden layers.
    beta : float
        As of `tb_loss`.
    start : float
        First estimate for every prompt.
    generator : torch.Generator, optional
        Draws the initial weights; None makes one with seed 0.

    Raises
    ------
    ValueError
        Embeddings that are not a matrix of finite numbers, or arguments out of range.

    Notes
    -----
    Kim et al., 2026, arXiv:2602.12642, Sec. 4 and Prop. 4.1: the least-squares intercept is ``p_old + beta * KL(pi_old || pi)``, over beta.
    Trained on fresh groups at ``pi = pi_old``, as `update` does, the divergence is zero and the estimate is of p_old itself.
    Use it where prompts are many and visits few, and embeddings tell hard from easy; with a small pool that is seen again and again
    `RunningAccuracy` may do as well. State: `state_dict` is without the embeddings, fit for safetensors.
    """

    embeddings: Tensor
    updates: Tensor

    def __init__(
        self,
        embeddings: Tensor,
        *,
        hidden: int = 256,
        beta: float = 0.05,
        start: float = 0.5,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if embeddings.ndim != 2 or not embeddings.is_floating_point() or not len(embeddings):
            raise ValueError(
                f"embeddings must be a float matrix, one row a prompt; got {embeddings.dtype} of shape {tuple(embeddings.shape)}"
            )
        if not bool(torch.isfinite(embeddings).all()):
            row = int((~torch.isfinite(embeddings)).any(dim=1).nonzero()[0])
            raise ValueError(f"the embedding of prompt {row} has values that are not finite")
        if hidden < 1 or not beta > 0 or not math.isfinite(start):
            raise ValueError(
                f"hidden must be at least 1, beta positive and start finite; got {hidden}, {beta} and {start}"
            )
        self.beta = float(beta)
        kept = (
            embeddings.detach().to(torch.float32)
            if embeddings.dtype in (torch.float16, torch.bfloat16)
            else embeddings.detach()
        )
        spread = kept.std(dim=0, correction=0)
        scaled = (kept - kept.mean(dim=0)) / torch.where(
            spread > 1e-6 * kept.abs().amax(), spread, torch.ones_like(spread)
        )
        self.register_buffer("embeddings", scaled, persistent=False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        options = {"dtype": kept.dtype, "device": kept.device}

        def linear(n: int, m: int) -> nn.Module:
            return nn.utils.skip_init(nn.Linear, n, m, **options)  # the usual way would draw from the global generator

        n_features = kept.shape[1]
        self.network = nn.Sequential(
            linear(n_features, hidden), nn.GELU(), linear(hidden, hidden), nn.GELU(), linear(hidden, 1)
        )
        self._initialise(start, generator or torch.Generator().manual_seed(0))

    @torch.no_grad()
    def _initialise(self, start: float, generator: torch.Generator) -> None:
        for layer in (self.network[0], self.network[2]):
            bound = 1 / math.sqrt(layer.in_features)
            for parameter in (layer.weight, layer.bias):
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64, device=generator.device)
                parameter.copy_((2 * drawn - 1) * bound)
        self.network[4].weight.zero_()
        self.network[4].bias.fill_(start)

    @property
    def n_prompts(self) -> int:
        return len(self.embeddings)

    def forward(self, prompt_ids: Tensor | None = None) -> Tensor:
        """p_hat with its gradient, unbounded; prompt_ids int64 of any shape, or None for the whole pool: shape of `prompt_ids`, or (P,)."""
        chosen = self.embeddings if prompt_ids is None else self.embeddings[self._checked(prompt_ids)]
        return self.network(chosen).squeeze(-1)

    def log_z(self, prompt_ids: Tensor | None = None) -> Tensor:
        """``p_hat / beta`` with its gradient, for `tb_loss`; never clipped. Shapes as of `forward`."""
        return self(prompt_ids) / self.beta

    @torch.no_grad()
    def accuracy(self, prompt_ids: Tensor | None = None, *, clip: bool = True) -> Tensor:
        """Estimated accuracy (expected reward) of each prompt, without gradient.

        Parameters
        ----------
        prompt_ids : int64 Tensor of any shape, optional
            None means the whole pool.
        clip : bool
            To [0, 1], for reports. With rewards of another range, and for selection, take False.
        """
        estimate = self(prompt_ids)
        return estimate.clamp(0, 1) if clip else estimate

    def loss(
        self, prompt_ids: Tensor, rewards: Tensor, *, log_ratio: Tensor | None = None, weights: Tensor | None = None
    ) -> Tensor:
        """``beta^2 * tb_loss`` as a function of the head alone: the mean of ``(p_hat + beta * log_ratio - reward)^2``.

        Parameters
        ----------
        prompt_ids : int64 Tensor, shape (B,)
        rewards : Tensor, shape (B,) or (B, G)
            Of texts drawn from the policy of now; replayed successes alone would draw the estimate to 1. NaN entries are left out.
        log_ratio : Tensor, same shape, optional
            ``log pi - log pi_old`` of each text. The estimate is then of ``p_old + beta * KL(pi_old || pi)``, as in the paper; None
            estimates p_old.
        weights : Tensor, same shape, optional
            Importance weights.

        Returns
        -------
        Tensor, scalar
            0 with a graph where no reward is a number.
        """
        if rewards.shape[:1] != prompt_ids.shape or prompt_ids.ndim != 1:
            raise ValueError(
                f"rewards need a row for each of the {tuple(prompt_ids.shape)} prompts, got shape {tuple(rewards.shape)}"
            )
        for name, values in (("log_ratio", log_ratio), ("weights", weights)):
            if values is not None and values.shape != rewards.shape:
                raise ValueError(
                    f"{name} must have the rewards' shape {tuple(rewards.shape)}, got {tuple(values.shape)}"
                )
        estimate = self(prompt_ids).reshape(-1, *[1] * (rewards.ndim - 1))
        rewards = rewards.to(estimate.dtype)
        scored = torch.isfinite(rewards)
        shift = 0.0 if log_ratio is None else self.beta * log_ratio.detach().to(estimate.dtype)
        residual = torch.where(scored, estimate + shift - torch.where(scored, rewards, torch.zeros_like(rewards)), 0.0)
        squared = residual.square()
        if weights is not None:
            squared = squared * torch.where(scored, weights.detach().to(estimate.dtype), 0.0)
        return squared.sum() / scored.sum().clamp(min=1)

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        prompt_ids: Tensor,
        rewards: Tensor,
        *,
        steps: int = 1,
        weights: Tensor | None = None,
    ) -> float:
        """Fit fresh groups by `steps` steps of `optimizer`; returns the loss before the first.

        Do it after the rewards are known and before the next selection: a stale head selects for the policy that was. Where no reward is
        a number, nothing is done and nothing counted.
        """
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        if not bool(torch.isfinite(rewards).any()):
            return 0.0
        first = 0.0
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = self.loss(prompt_ids, rewards, weights=weights)
            loss.backward()
            optimizer.step()
            first = float(loss.detach()) if step == 0 else first
        self.updates += 1
        return first

    def _checked(self, prompt_ids: Tensor) -> Tensor:
        if prompt_ids.is_floating_point() or prompt_ids.dtype == torch.bool:
            raise TypeError(f"prompt_ids are whole numbers, positions in the pool; got {prompt_ids.dtype}")
        if prompt_ids.numel() and (int(prompt_ids.min()) < 0 or int(prompt_ids.max()) >= self.n_prompts):
            raise ValueError(
                f"prompt_ids must lie in 0..{self.n_prompts - 1}, got {int(prompt_ids.min())} to {int(prompt_ids.max())}"
            )
        return prompt_ids


class RunningAccuracy:
    """Accuracy of each prompt by a Beta-Bernoulli counter that forgets: the cheap control for `PartitionHead`.

    A visit multiplies that prompt's counts by `forgetting` and adds its rewards; the estimate is ``(prior * start + successes) / (prior +
    trials)``. It knows nothing of prompts that it has not seen: they keep `start`.

    Parameters
    ----------
    n_prompts : int
    forgetting : float
        In [0, 1]; 1 never forgets.
    prior : float
        Weight of `start`, in rollouts; positive.
    start : float
    """

    def __init__(self, n_prompts: int, *, forgetting: float = 0.9, prior: float = 2.0, start: float = 0.5) -> None:
        if n_prompts < 1 or not 0 <= forgetting <= 1 or not prior > 0 or not math.isfinite(start):
            raise ValueError(
                f"n_prompts must be at least 1, forgetting in [0, 1], prior positive and start finite; got {n_prompts}, {forgetting}, {prior}, {start}"
            )
        self.forgetting, self.prior, self.start = float(forgetting), float(prior), float(start)
        self.successes = torch.zeros(n_prompts, dtype=torch.float64)
        self.trials = torch.zeros(n_prompts, dtype=torch.float64)

    @property
    def n_prompts(self) -> int:
        return len(self.trials)

    def update(self, prompt_ids: Tensor, rewards: Tensor) -> None:
        """Count groups: prompt_ids int64 (B,), different from each other; rewards (B, G), NaN entries left out, in [0, 1] or beyond."""
        if rewards.ndim != 2 or rewards.shape[:1] != prompt_ids.shape:
            raise ValueError(f"rewards must have shape ({len(prompt_ids)}, G), got {tuple(rewards.shape)}")
        if len(prompt_ids) and not 0 <= int(prompt_ids.min()) <= int(prompt_ids.max()) < self.n_prompts:
            raise ValueError(
                f"prompt_ids must lie in 0..{self.n_prompts - 1}, got {int(prompt_ids.min())} to {int(prompt_ids.max())}"
            )
        if len(torch.unique(prompt_ids)) < len(prompt_ids):
            raise ValueError("a prompt stands twice in prompt_ids; put its rewards into one row")
        rewards = rewards.detach().to("cpu", torch.float64)
        at = prompt_ids.cpu()
        scored = torch.isfinite(rewards)
        for counts, new in (
            (self.successes, torch.where(scored, rewards, 0.0).sum(1)),
            (self.trials, scored.sum(1).to(torch.float64)),
        ):
            counts[at] = torch.where(scored.any(1), self.forgetting * counts[at] + new, counts[at])

    def accuracy(self, prompt_ids: Tensor | None = None, *, clip: bool = True) -> Tensor:
        """As of `PartitionHead`, float64."""
        estimate = (self.prior * self.start + self.successes) / (self.prior + self.trials)
        estimate = estimate if prompt_ids is None else estimate[prompt_ids]
        return estimate.clamp(0, 1) if clip else estimate

    def state_dict(self) -> dict[str, Tensor]:
        return {"successes": self.successes.clone(), "trials": self.trials.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state["trials"].shape != self.trials.shape:
            raise ValueError(f"the state is of {len(state['trials'])} prompts, this pool has {self.n_prompts}")
        self.successes, self.trials = state["successes"].clone(), state["trials"].clone()
