"""`fold`: a plain model of the same function with flatter weights."""

import pytest
import torch

from cameraready.lm.fptquant import FPTConfig, fold
from cameraready.lm.fptquant.optimisation import p_norm
from tests.lm.fptquant_models import awkward, tokens

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_plain_model_of_the_same_function(kind):
    model = awkward(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ids = tokens()
    plain = fold(model, steps=3, progress=False)
    assert type(plain) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=0, atol=1e-9)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not torch.equal(
        plain.model.layers[0].self_attn.v_proj.weight, state["model.layers.0.self_attn.v_proj.weight"]
    )


def test_uneven_channels_are_evened_out():
    model = awkward("llama")
    mlp = model.model.layers[0].mlp
    uneven = torch.logspace(-2, 2, mlp.up_proj.out_features, dtype=torch.float64)
    mlp.up_proj.weight.data.mul_(uneven[:, None])
    mlp.down_proj.weight.data.div_(uneven)
    config = FPTConfig.mergeable(prerope=False, value=False, rotate=False)
    folded = fold(model, config, steps=100, lr=0.1, progress=False).model.layers[0].mlp

    def norms(part):
        return sum(p_norm(part.get_submodule(name).weight, 4).item() for name in ("up_proj", "down_proj"))

    assert norms(folded) < 0.5 * norms(mlp)


@pytest.mark.parametrize("name", ["residual_scale", "down_hadamard"])
def test_what_runs_with_the_model_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} cannot be folded into weights"):
        fold(awkward("llama"), FPTConfig.mergeable(**{name: True}))
