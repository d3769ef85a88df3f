"""How FPTQuant is used on a model, for the conformance test that the room's components share."""

from cameraready.lm.fptquant import FPTConfig, FPTQuantizer, QuantConfig
from tests.lm.component_cases import Case


def quantise(model, tokenizer):
    """All that is exact on the model, the weights' own optimisation, ranges, two steps of training, and a forward pass of the result."""
    ids = tokenizer("What a model reads to find its ranges.", return_tensors="pt").input_ids
    fpt = FPTQuantizer(model, FPTConfig(unsupported="skip")).optimize_local(steps=2)
    fpt.calibrate([ids], QuantConfig()).train_end_to_end([ids], steps=2)
    return fpt.model(ids).logits


def merge(model, tokenizer):
    """A plain model that computes the same."""
    ids = tokenizer("What a model reads.", return_tensors="pt").input_ids
    return FPTQuantizer(model, FPTConfig.mergeable(unsupported="skip")).optimize_local(steps=2).merge()(ids).logits


CASES = [Case("quantise", quantise), Case("merge", merge)]
