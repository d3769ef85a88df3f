"""Small recurrent policies, one for each of S seeds, trained side by side: parameters are stacked and every product is one batched product."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cameraready.posttraining._testbed import walking
from cameraready.posttraining._testbed.cell import GRUCell


def seed_generators(
    seeds: int | Sequence[int], generator: torch.Generator | Sequence[torch.Generator] | None = None
) -> list[torch.Generator]:
    """One generator for each seed.

    Parameters
    ----------
    seeds : int or sequence of int
        How many (then 0, 1, ...) or which.
    generator : generator or list of generators, optional
        A list is returned as it is; from a single one each seed's own is started in turn; without, each is started from its seed's number, so that a seed is the same whichever others run beside it.

    Raises
    ------
    ValueError
        If there are no seeds, or the list has another length.
    """
    numbers = list(range(seeds)) if isinstance(seeds, int) else [int(s) for s in seeds]
    if not numbers:
        raise ValueError("give at least one seed")
    if generator is None:
        return [torch.Generator().manual_seed(s) for s in numbers]
    if isinstance(generator, torch.Generator):
        return [torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator))) for _ in numbers]
    if len(generator) != len(numbers):
        raise ValueError(f"{len(numbers)} seeds need {len(numbers)} generators, got {len(generator)}")
    return list(generator)


class GRUs:
    """Gated recurrent networks over tokens, S at once.

    The initial state of every layer is a linear map of the features, squashed; the first input is a begin symbol of the network's own. Used on an `EnumerableTask`, or as language models on any tokens (`log_probs`, `logits`, `begin`, `advance`).

    Parameters
    ----------
    seeds : int or sequence of int
    vocabulary : int
    features : int
        Width of a prompt's features; 0 for none.
    width : int
    layers : int
    generator : torch.Generator or list of one for each seed, optional
        For the initial parameters; by default each seed's from its own number.
    step_features : int
        Width of features given at every position (added to the token's embedding); 0 for none.
    dtype : torch.dtype

    Notes
    -----
    Gates as in `torch.nn.GRU` (Cho et al., 2014, arXiv:1406.1078, with the reset gate after the product).
    """

    def __init__(
        self,
        seeds: int | Sequence[int],
        vocabulary: int,
        features: int = 0,
        width: int = 64,
        layers: int = 2,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        *,
        step_features: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        for what, value, least in (
            ("vocabulary", vocabulary, 1),
            ("width", width, 1),
            ("layers", layers, 1),
            ("features", features, 0),
            ("step_features", step_features, 0),
        ):
            if value < least:
                raise ValueError(f"{what} must be at least {least}, got {value}")
        generators = seed_generators(seeds, generator)
        self.seeds, self.vocabulary, self.features, self.width, self.layers, self.step_features = (
            len(generators),
            vocabulary,
            features,
            width,
            layers,
            step_features,
        )
        bound = width**-0.5
        shapes: dict[str, tuple[tuple[int, ...], float]] = {
            "embedding": ((vocabulary + 1, width), 3**0.5)
        }  # variance 1; the last row begins
        if features:
            shapes["initial.weight"] = ((features, layers * width), (3 / features) ** 0.5)
            shapes["initial.bias"] = ((layers * width,), 0.0)
        if step_features:
            shapes["step.weight"] = ((step_features, width), (3 / step_features) ** 0.5)
        for layer in range(layers):
            shapes[f"{layer}.input"] = ((width, 3 * width), bound)
            shapes[f"{layer}.input_bias"] = ((3 * width,), bound)
            shapes[f"{layer}.hidden"] = ((width, 3 * width), bound)
            shapes[f"{layer}.hidden_bias"] = ((3 * width,), bound)
        shapes["head.weight"] = ((width, vocabulary), bound)
        shapes["head.bias"] = ((vocabulary,), 0.0)
        self._weights = {
            name: torch.stack(
                [(torch.rand(shape, generator=g, dtype=torch.float64) * 2 - 1) * scale for g in generators]
            )
            .to(dtype)
            .requires_grad_()
            for name, (shape, scale) in shapes.items()
        }

    def parameters(self) -> list[Tensor]:
        """Stacked parameters (S, ...), for any optimizer that works elementwise."""
        return list(self._weights.values())

    def state(self) -> dict[str, Tensor]:
        """Copies of the parameters by name."""
        return {name: p.detach().clone() for name, p in self._weights.items()}

    def load(self, state: dict[str, Tensor]) -> "GRUs":
        """Take over parameters as `state` gives them; returns itself."""
        if state.keys() != self._weights.keys():
            raise ValueError(f"the state has other parameters: {sorted(state.keys() ^ self._weights.keys())}")
        with torch.no_grad():
            for name, p in self._weights.items():
                if p.shape != state[name].shape:
                    raise ValueError(f"{name} has shape {tuple(p.shape)}, the state's has {tuple(state[name].shape)}")
                p.copy_(state[name])
        return self

    def copy(self) -> "GRUs":
        """The same networks with parameters of their own."""
        return self.select(slice(None))

    def select(self, seeds: Any) -> "GRUs":
        """Some of the networks (or one several times), with parameters of their own: a slice or a list of positions."""
        other = object.__new__(GRUs)
        other.__dict__.update(self.__dict__)
        other._weights = {name: p.detach()[seeds].clone().requires_grad_() for name, p in self._weights.items()}
        other.seeds = len(other._weights["head.bias"])
        return other

    # Any tokens: a language model.

    def begin(self, batch: int, features: Tensor | None = None) -> list[Tensor]:
        """Initial state, a tensor (S, batch, width) for each layer.

        Parameters
        ----------
        batch : int
        features : (S, batch, F) or (batch, F) float
            Needed if the networks were built with features.
        """
        w = self._weights
        if not self.features:
            if features is not None and features.shape[-1]:
                raise ValueError("these networks were built without features; give features=F when building them")
            return [w["head.bias"].new_zeros(self.seeds, batch, self.width)] * self.layers
        if features is None or features.shape[-1] != self.features:
            raise ValueError(
                f"these networks expect {self.features} features a prompt, got {None if features is None else features.shape[-1]}"
            )
        features = features.to(w["head.bias"].dtype).expand(self.seeds, batch, self.features)
        return list(
            torch.tanh(torch.baddbmm(w["initial.bias"][:, None], features, w["initial.weight"])).chunk(self.layers, -1)
        )

    def _gates(self) -> Tensor:
        """First layer's input gates of every token and of the begin symbol, (S, V + 1, 3 width)."""
        w = self._weights
        return torch.baddbmm(w["0.input_bias"][:, None], w["embedding"], w["0.input"])

    def _cell(self, layer: int, gates: Tensor, h: Tensor) -> Tensor:
        w = self._weights
        return GRUCell.apply(gates, h, w[f"{layer}.hidden"], w[f"{layer}.hidden_bias"])

    def _through(self, gates: Tensor, state: list[Tensor]) -> list[Tensor]:
        w = self._weights
        new = [self._cell(0, gates, state[0])]
        for layer in range(1, self.layers):
            new.append(
                self._cell(
                    layer, torch.baddbmm(w[f"{layer}.input_bias"][:, None], new[-1], w[f"{layer}.input"]), state[layer]
                )
            )
        return new

    def _head(self, h: Tensor) -> Tensor:
        return torch.baddbmm(self._weights["head.bias"][:, None], h, self._weights["head.weight"])

    def advance(
        self, state: list[Tensor], tokens: Tensor | None, step_features: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """One step: read a token each, give the logits of the next.

        Parameters
        ----------
        state : list of (S, B, width)
        tokens : (S, B) int64 or None
            None reads the begin symbol.
        step_features : (S, B, D) float, optional

        Returns
        -------
        state, logits (S, B, V)
        """
        batch = state[0].shape[1]
        if tokens is None:
            gates = self._gates()[:, -1:].expand(-1, batch, -1)
        else:
            self._check(tokens)
            gates = _rows(self._gates(), tokens)
        if self.step_features:
            gates = gates + self._step_gates(step_features, gates.shape[:2])
        state = self._through(gates, state)
        return state, self._head(state[-1])

    def _step_gates(self, step_features: Tensor | None, shape: torch.Size) -> Tensor:
        if step_features is None or step_features.shape != (*shape, self.step_features):
            raise ValueError(
                f"step features must have shape {(*shape, self.step_features)}, got {None if step_features is None else tuple(step_features.shape)}"
            )
        w = self._weights
        flat = step_features.to(w["0.input"].dtype).flatten(1, -2)
        return torch.bmm(torch.bmm(flat, w["step.weight"]), w["0.input"]).view(*shape, -1)

    def _check(self, tokens: Tensor) -> None:
        if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocabulary):
            raise ValueError(
                f"tokens must be between 0 and {self.vocabulary - 1}, got {int(tokens.min())} to {int(tokens.max())}"
            )

    def logits(self, tokens: Tensor, features: Tensor | None = None, *, step_features: Tensor | None = None) -> Tensor:
        """Logits (S, B, T, V) of each token given those before it (and the features): entry ``t`` predicts ``tokens[..., t]``, reading the begin symbol and ``tokens[..., :t]``.

        Parameters
        ----------
        tokens : (S, B, T) int64
        features : (S, B, F) or (B, F) float, optional
        step_features : (S, B, T, D) float, optional
            What is known before token ``t`` is predicted.
        """
        if tokens.dim() != 3 or len(tokens) != self.seeds:
            raise ValueError(f"tokens must have shape ({self.seeds}, B, T), got {tuple(tokens.shape)}")
        self._check(tokens)
        seeds, batch, length = tokens.shape
        begin = torch.full((seeds, batch, 1), self.vocabulary)
        gates = _rows(self._gates(), torch.cat([begin, tokens[..., :-1]], -1).flatten(1)).view(seeds, batch, length, -1)
        if self.step_features:
            gates = gates + self._step_gates(step_features, tokens.shape)
        w = self._weights
        for layer, h in enumerate(self.begin(batch, features)):
            states = []
            for gate in gates.unbind(2):
                h = self._cell(layer, gate, h)
                states.append(h)
            outputs = torch.stack(states, 2).flatten(1, 2)
            if layer + 1 < self.layers:
                gates = torch.baddbmm(w[f"{layer + 1}.input_bias"][:, None], outputs, w[f"{layer + 1}.input"])
                gates = gates.view(seeds, batch, length, -1)
        return self._head(outputs).view(seeds, batch, length, -1)

    def log_probs(
        self,
        tokens: Tensor,
        features: Tensor | None = None,
        mask: Tensor | None = None,
        *,
        step_features: Tensor | None = None,
        allowed: Tensor | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probabilities (S, B, T) of tokens under teacher forcing.

        Parameters
        ----------
        tokens : (S, B, T) int64
            Any tokens; where `mask` is false they are read (a prompt, an environment's words) or are padding, and are not scored.
        features : (S, B, F) or (B, F) float, optional
        mask : (S, B, T) bool, optional
            False gives 0 and no gradient.
        step_features : (S, B, T, D) float, optional
        allowed : (..., T, V) bool, optional
            Restricts the softmax, as an enumerable task does.
        temperature : float
        """
        logits = self.logits(tokens, features, step_features=step_features) / temperature
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        picked = torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0]
        return picked if mask is None else torch.where(mask, picked, 0.0)

    # Enumerable tasks.

    def walk(self, task: Any, prompts: Tensor) -> "_GRUWalk":
        """Start down the task's prefix tree from prompts (S, B)."""
        return _GRUWalk(self, task, prompts)

    def all_log_probs(self, task: Any, prompts: Tensor | None = None) -> Tensor:
        """Exact log-probabilities of all completions of a task.

        Parameters
        ----------
        task : EnumerableTask
        prompts : (B,) or (S, B) int64, optional
            By default all.

        Returns
        -------
        (S, B, N) float; their exponentials sum to one over the last axis.
        """
        return walking.all_log_probs(self, task, prompts)

    def sample_log_probs(self, task: Any, prompts: Tensor, index: Tensor, *, entropy: bool = False) -> Any:
        """Log-probabilities of the tokens of given completions, each shared prefix computed once.

        Parameters
        ----------
        task : EnumerableTask
        prompts : (B,) or (S, B) int64
        index : (S, B, n) int64
            Which completion.
        entropy : bool
            Also return the entropies of the distributions the tokens were drawn from.

        Returns
        -------
        (S, B, n, T) float, 0 at padding and at tokens without a choice; or a pair of such.
        """
        return walking.sample_log_probs(self, task, prompts, index, entropy=entropy)


class _GRUWalk:
    def __init__(self, policy: GRUs, task: Any, prompts: Tensor):
        if task.vocabulary > policy.vocabulary:
            raise ValueError(f"the task uses {task.vocabulary} tokens, the networks know {policy.vocabulary}")
        self.policy, self.task = policy, task
        self.state = policy.begin(prompts.shape[1], task.features[prompts] if policy.features else None)
        self.gates = policy._gates()

    def level(self, depth: int, parent: Tensor, node: Tensor, origin: Tensor) -> Tensor:
        level = self.task.trie.levels[depth]
        gates = _rows(self.gates, level.token[node]) if depth else self.gates[:, -1:].expand(-1, node.shape[1], -1)
        flat = parent.flatten()
        state = [h.flatten(0, 1).index_select(0, flat).view(*node.shape, -1) for h in self.state]
        self.state = self.policy._through(gates, state)
        logits = self.policy._head(self.state[-1])[..., : self.task.vocabulary]
        return torch.log_softmax(logits.masked_fill(~level.allowed[node], -torch.inf), -1)


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of each seed's table: (S, V, D) and (S, U) give (S, U, D)."""
    seeds, size, width = table.shape
    flat = (torch.arange(seeds)[:, None] * size + index).flatten()
    return torch.nn.functional.embedding(flat, table.reshape(seeds * size, width)).view(seeds, -1, width)
