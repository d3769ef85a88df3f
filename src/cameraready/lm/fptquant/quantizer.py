"""FPTQuantizer: transform a model, optimise, calibrate, train, merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cameraready.lm.fptquant import export
from cameraready.lm.fptquant.host import read_host
from cameraready.lm.fptquant.merging import FPTConfig, Read, Transforms
from cameraready.lm.fptquant.optimisation import Progress, optimise_locally, train
from cameraready.lm.fptquant.quantisers import QuantConfig, WeightQuantiser, checked
from cameraready.lm.fptquant.simulation import (
    insert_quantisers,
    quantisers,
    remember_quantisers,
    simulate,
    switched,
)
from cameraready.lm.fptquant.transforms import ValueTransform, condition

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

#: Worst acceptable difference of the logits, relative to their standard deviation, by dtype of the model.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3, torch.bfloat16: 0.2, torch.float16: 0.05}


class FPTQuantizer:
    """Function-preserving transforms for a causal language model, and its static integer quantisation, simulated (van Breugel et al., 2025, arXiv:2506.04985).

    The model computes the same function before and after, with weights and activations that quantise better. Four of the six
    transforms vanish into the weights; ``residual_scale`` and ``down_hadamard`` run with the model. The order of work::

        fpt = FPTQuantizer(model)                  # insert; nothing has changed yet but the residual's Hadamard rotation
        fpt.optimize_local()                       # data-free: flatten the merged weights
        fpt.calibrate(batches, QuantConfig())      # ranges, on a few batches of token ids
        fpt.train_end_to_end(batches, steps=1000)  # optional: transforms and ranges, towards the model's own predictions
        fpt.model(ids)                             # the quantised model, simulated
        fpt.merge().save_pretrained(folder)        # a plain transformers model; needs FPTConfig.mergeable()

    Use it for Llama, Mistral, Qwen2 and their like, on hardware with static integer ranges. On models with norms behind the sub-blocks or on
    queries and keys (Gemma, Qwen3) only a part is exact; what is not is refused, or left out with ``unsupported="skip"``.
    Do not use it where weights alone are quantised: activations are what it is made for.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder-only model with separate q, k, v, o, gate, up and down projections, floating point, without adapters. It is not changed,
        and it is read again at every step and merge: leave it as it is.
    config : FPTConfig, optional
        Which transforms; the default is all six.

    Attributes
    ----------
    model : nn.Module
        The transformed model, called as `model` is. In full precision at first, quantised after `calibrate`. Its weights are those that `transforms`
        made last (see `refresh`).
    transforms : Transforms
        Parameters of the transforms, float64.
    skipped : dict of str to str
        Transforms that were left out, and why.

    Raises
    ------
    ValueError
        With a sentence, for a model whose structure is unknown, or a transform that would not be exact on it.

    Notes
    -----
    Memory: beside the given model one copy in the same dtype (with a head of its own if embeddings are tied), and d^2 float64 for the
    rotation. `optimize_local` adds gradients of one layer at a time; `train_end_to_end` the activations of a batch and all transformed
    weights in float32. Merging is done in float64, tensor by tensor, and rounded once.
    """

    def __init__(self, model: PreTrainedModel, config: FPTConfig | None = None):
        config = FPTConfig() if config is None else config
        if not isinstance(config, FPTConfig):
            raise TypeError(
                f"config must be an FPTConfig, such as FPTConfig(rotate=False), got {type(config).__name__}"
            )
        self.host = read_host(model)
        self.skipped: dict[str, str] = {}
        for name in config.wanted:
            if name in self.host.obstacles:
                if config.unsupported == "error":
                    raise ValueError(
                        f"{name}=True is not exact on {type(model).__name__}: {self.host.obstacles[name]}. Set {name}=False, or "
                        'unsupported="skip" to go without whatever is not exact'
                    )
                self.skipped[name] = self.host.obstacles[name]
        self.config = dataclasses.replace(config, **dict.fromkeys(self.skipped, False))
        self.given = model
        self.quantisation: QuantConfig | None = None
        self.transforms = Transforms(self.host, self.config).to(next(model.parameters()).device)
        self.model = simulate(model, self.host, self.config, [each.hadamard for each in self.transforms.layers])
        self._local = Progress()
        self._trained = Progress()
        self.refresh()

    def __repr__(self) -> str:
        bits = "not calibrated" if self.quantisation is None else self.quantisation.describe()
        return f"FPTQuantizer({type(self.given).__name__}, {', '.join(self.config.wanted) or 'no transform'}, {bits})"

    # --- transforms ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def refresh(self) -> FPTQuantizer:
        """Merge the transforms as they are into the weights of `model` (in `FPTConfig.precision`, rounded once to its dtype); returns self.

        Called by the methods that change the transforms; call it after changing their parameters yourself.
        """
        target = dict(self.model.named_parameters(remove_duplicate=False))
        for name, value in self.transforms.merged(Read(self.given, getattr(torch, self.config.precision))):
            target[name].copy_(value)
        return self

    @torch.no_grad()
    def difference(self, ids: Tensor) -> float:
        """Largest difference between the logits of the given model and of the transformed one in full precision.

        Parameters
        ----------
        ids : LongTensor, shape (batch, tokens)

        Returns
        -------
        float
            Absolute; rounding makes it 1e-5 or so in float32. transformers computes norms in float32 also in a float64 model.
        """
        (ids,) = self._checked([ids])
        with self.full_precision():
            return float((self.model(ids).logits - self.given(ids).logits).abs().max())

    def verify(self, ids: Tensor) -> FPTQuantizer:
        """Raise RuntimeError unless the transformed model, in full precision, gives the given one's logits on `ids` up to rounding."""
        spread = float(self.given(ids).logits.detach().float().std())
        dtype = next(self.given.parameters()).dtype
        off = self.difference(ids)
        if not off <= TOLERANCE.get(dtype, 0.2) * spread:
            raise RuntimeError(
                f"the transformed model's logits differ by up to {off:.3g} (their standard deviation is {spread:.3g}): the transforms "
                f"are not exact on {type(self.given).__name__}; please report it, and leave transforms out one by one to see which"
            )
        return self

    def full_precision(self) -> Any:
        """Context manager within which `model` runs without quantisers."""
        return switched(self.model, "off")

    def optimize_local(
        self,
        *,
        p: float = 4.0,
        steps: int = 200,
        lr: float = 1e-2,
        rows: int | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> FPTQuantizer:
        """Flatten the merged weights without data: AdamW on the sum over transformed layers of (mean |W|^p)^(1/p); returns self.

        Every layer with a transform enters the loss (the published code drops some when a layer has several).

        Parameters
        ----------
        p : float
            Exponent; large ones punish outliers.
        steps : int
            Steps in all. After an interruption the same call does the rest, with the result of an uninterrupted one.
        lr : float
        rows : int, optional
            A random number of rows (of readers) or columns (of writers) enters each step instead of all: what makes a rotation
            affordable on a CPU. Unused without `rotate`.
        seed : int
            Of those rows.
        progress : bool, optional
            Whether to show a progress bar; by default if standard error is a terminal.
        """
        if self.quantisation is not None and steps > len(self._local.losses):
            raise RuntimeError(
                "optimize_local comes before calibrate: the ranges found would be those of other transforms. Make a new FPTQuantizer"
            )
        try:
            optimise_locally(
                self.transforms,
                self.given,
                self._local,
                p=p,
                steps=steps,
                lr=lr,
                rows=rows,
                seed=seed,
                progress=progress,
            )
        finally:
            self.refresh()
        return self

    @property
    def local_losses(self) -> list[float]:
        """Loss of every step of `optimize_local` so far."""
        return self._local.losses

    # --- quantisation -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def calibrate(self, batches: Iterable[Tensor], config: QuantConfig | None = None) -> FPTQuantizer:
        """Insert quantisers and find their ranges, in full precision, on token ids; returns self.

        Parameters
        ----------
        batches : iterable of LongTensor, shape (batch, tokens)
            A few thousand tokens of text like that to come, as long as the contexts to come: post-RoPE keys drift with position.
        config : QuantConfig, optional
            Default: weights, activations and cache at 4 bits, static.

        Raises
        ------
        ValueError
            No batch, or a batch that is no (batch, tokens) tensor of integers.
        """
        config = QuantConfig() if config is None else config
        if not isinstance(config, QuantConfig):
            raise TypeError(f"config must be a QuantConfig, such as QuantConfig(kv=8), got {type(config).__name__}")
        texts = self._checked(batches)
        put_back = remember_quantisers(self.model, self.host)
        try:
            insert_quantisers(self.model, self.host, config)
            with switched(self.model, "observe"):
                for ids in texts:
                    self.model(ids, use_cache=False)
            for _, quantiser in quantisers(self.model):
                if not isinstance(quantiser, WeightQuantiser):
                    quantiser.search()
            self._search_weights()
        except BaseException:
            put_back()
            raise
        self.quantisation = config
        self._trained = Progress()
        return self

    def _checked(self, batches: Iterable[Tensor]) -> list[Tensor]:
        return checked(batches, self.given.get_submodule(self.host.embedding).num_embeddings)

    def _search_weights(self) -> None:
        for _, module in self.model.named_modules():
            found = getattr(module, "weight_quantiser", None)
            if found is not None:
                found.search(module.weight)

    def train_end_to_end(
        self,
        batches: Iterable[Tensor],
        *,
        steps: int = 1000,
        lr: float = 1e-3,
        range_lr: float | None = None,
        loss: Literal["jsd", "kl", "text"] = "jsd",
        progress: bool | None = None,
    ) -> FPTQuantizer:
        """Train transforms and ranges so that the quantised model predicts what the given one predicts; returns self.

        Weights are frozen. Rounding passes gradients straight through. AdamW with a cosine schedule; batches are taken in turn.

        Parameters
        ----------
        batches : iterable of LongTensor, shape (batch, tokens)
        steps : int
            Steps in all. After an interruption the same call does the rest.
        lr, range_lr : float
            Learning rates of the transforms and of the (logarithms of the) ranges; `range_lr` is `lr` by default.
        loss : {"jsd", "kl", "text"}
            Jensen-Shannon divergence between next-token distributions, Kullback-Leibler divergence from the given model's, or
            cross-entropy on the text itself.
        progress : bool, optional

        Raises
        ------
        RuntimeError
            Before `calibrate`.
        """
        if self.quantisation is None:
            raise RuntimeError(
                "calibrate(batches, config) comes before train_end_to_end: there is nothing quantised yet"
            )
        try:
            train(
                self,
                self._checked(batches),
                self._trained,
                steps=steps,
                lr=lr,
                range_lr=lr if range_lr is None else range_lr,
                loss=loss,
                progress=progress,
            )
        finally:
            self.refresh()
        return self

    @property
    def trained_losses(self) -> list[float]:
        """Loss of every step of `train_end_to_end` so far."""
        return self._trained.losses

    # --- results ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """A plain transformers model of the same class with the transforms in its weights, unquantised.

        Parameters
        ----------
        dtype : torch.dtype, optional
            Of the result; the given model's by default. The product is computed in float64 and rounded once.

        Raises
        ------
        ValueError
            If ``residual_scale`` or ``down_hadamard`` is on: they run with the model, and a plain checkpoint has no place for them.
        """
        export.refuse_online(self.config, "merged into a plain transformers model")
        return export.merged(self, dtype)

    def export(
        self,
        folder: str | Path,
        *,
        format: Literal["plain", "compressed-tensors"] = "plain",
        without: Sequence[Literal["kv", "residual"]] = (),
    ) -> Path:
        """Write the merged model to `folder`: full precision, or integers in compressed-tensors' format with the ranges found here.

        Parameters
        ----------
        folder : path
            Made if absent; the tokenizer is not written.
        format : {"plain", "compressed-tensors"}
            ``"compressed-tensors"`` needs `calibrate` and the package of that name; transformers and vLLM load it. It holds weights, and the
            ranges of the linear layers' inputs if activations are quantised. Ranges of the cache and of the residual stream have no
            place in it and are refused.
        without : sequence of {"kv", "residual"}
            What the checkpoint may go without.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        ValueError
            For what the format cannot express; RuntimeError before `calibrate`.
        """
        export.refuse_online(self.config, "written to a checkpoint")
        return export.write(self, folder, format, without)

    def conditions(self) -> dict[str, float]:
        """Condition number of each layer's T_v; beyond a thousand or so float32 loses digits."""
        found = {}
        for layer, own in zip(self.host.layers, self.transforms.layers, strict=True):
            if isinstance(own.value, ValueTransform):
                found[layer.v] = condition(own.value)
        return found

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Transforms, ranges and the optimisers' state: tensors, numbers and strings, for `torch.save`."""
        return {
            "config": dataclasses.asdict(self.config),
            "transforms": {k: v.detach().clone() for k, v in self.transforms.state_dict().items()},
            "quantisation": None if self.quantisation is None else dataclasses.asdict(self.quantisation),
            "ranges": {
                f"{name}.{key}": value.detach().clone()
                for name, quantiser in quantisers(self.model)
                for key, value in quantiser.state_dict().items()
            },
            "local": self._local.state_dict(),
            "trained": self._trained.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> FPTQuantizer:
        """Take over what `state_dict` gave, for a quantizer of the same model and config; returns self."""
        if FPTConfig(**state["config"]) != self.config:
            raise ValueError(f"the state is of {FPTConfig(**state['config'])}, this quantizer of {self.config}")
        self.transforms.load_state_dict(state["transforms"])
        self.refresh()
        self._local = Progress.from_state(state["local"])
        self._trained = Progress.from_state(state["trained"])
        self.quantisation = None
        if state["quantisation"] is not None:
            self.quantisation = QuantConfig(**state["quantisation"])
            insert_quantisers(self.model, self.host, self.quantisation)
            for name, quantiser in quantisers(self.model):
                for key, parameter in quantiser.named_parameters():
                    parameter.copy_(state["ranges"][f"{name}.{key}"])
                quantiser.mode = "on"
        return self
