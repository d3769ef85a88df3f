"""From a model to a plain model that quantises better, in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cameraready.lm.fptquant.merging import FPTConfig
from cameraready.lm.fptquant.quantizer import FPTQuantizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fold(
    model: PreTrainedModel, config: FPTConfig | None = None, *, steps: int = 200, **options: Any
) -> PreTrainedModel:
    """A plain copy of a model with fitted transforms folded into its weights: the same function, easier to quantise by whatever comes next.

    `FPTQuantizer` followed by `FPTQuantizer.optimize_local` and `FPTQuantizer.merge`; needs no data. Use it before a quantiser of your
    runtime's. Do not use it where activations and cache stay in floating point: there is nothing to win.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        As for `FPTQuantizer`; left as it is.
    config : FPTConfig, optional
        Transforms that vanish into weights; by default all of these that are exact on the model.
    steps : int
        Of the local optimisation; 0 folds the transforms as they start (a Hadamard rotation of the residual stream).
    **options
        Further arguments of `FPTQuantizer.optimize_local` (``p``, ``lr``, ``rows``, ``seed``, ``progress``).

    Returns
    -------
    PreTrainedModel
        Of the same class and dtype, embeddings untied where a rotation asks for it; ``save_pretrained`` writes it.

    Raises
    ------
    ValueError
        A transform that runs with the model (``residual_scale``, ``down_hadamard``) is asked for, one is not exact on the model, or the
        model's structure is unknown.

    References
    ----------
    van Breugel et al., 2025, arXiv:2506.04985.
    """
    config = FPTConfig.mergeable(unsupported="skip") if config is None else config
    online = [name for name in ("residual_scale", "down_hadamard") if getattr(config, name)]
    if online:
        raise ValueError(
            f"{' and '.join(online)} cannot be folded into weights, since {'they run' if len(online) > 1 else 'it runs'} with the model; "
            "leave out what runs (FPTConfig.mergeable()), or use FPTQuantizer"
        )
    quantizer = FPTQuantizer(model, config)
    if steps:
        quantizer.optimize_local(steps=steps, **options)
    return quantizer.merge()
