"""What every component of the room keeps to on a language model: it serves or refuses, and leaves the model as it was."""

import importlib

import pytest
import torch

from cameraready.catalog import catalog
from cameraready.models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.torch

KINDS = ("llama", "qwen3", "gemma3", "mistral")
CASES = [
    pytest.param(case, id=f"{card.slug}-{case.name}")
    for card in catalog()
    if card.room == "lm"
    for case in importlib.import_module(f"tests.lm.{card.module.rsplit('.', 1)[1]}_cases").CASES
]
every_case = pytest.mark.parametrize("case", CASES)
every_kind = pytest.mark.parametrize("kind", KINDS)

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class Broken(RuntimeError):
    """Raised inside the model's own head, in the middle of whatever a component does."""


def hooks(model):
    return {
        (name, kind): tuple(getattr(module, kind)) for name, module in model.named_modules() for kind in HOOKS
        if getattr(module, kind, None)
    }  # fmt: skip


def methods_of(model):
    """Attributes that instances carry over their classes: a replaced `forward` would be one."""
    return {
        name: sorted(vars(module).keys() & {"forward", "generate", "__call__"})
        for name, module in model.named_modules()
    }


def picture(model, ids):
    with torch.no_grad():
        logits = model(ids).logits.clone()
    return {
        "hooks": hooks(model),
        "methods": methods_of(model),
        "training": {name: module.training for name, module in model.named_modules()},
        "gradients": {name: p.requires_grad for name, p in model.named_parameters()},
        "attention": model.config._attn_implementation,
        "settings": model.config.to_json_string(),
        "generation": model.generation_config.to_json_string(),
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "logits": logits,
    }


def assert_same(before, after):
    for what, value in before.items():
        if what == "state":
            assert value.keys() == after["state"].keys()
            assert [name for name in value if not torch.equal(value[name], after["state"][name])] == []
        elif what == "logits":
            assert torch.equal(value, after["logits"])
        else:
            assert value == after[what], what


@pytest.fixture
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def ids(tokenizer):
    return tokenizer("What is kept, and what goes?", return_tensors="pt").input_ids


def used(case, kind, model, tokenizer):
    if kind in case.refuses:
        with pytest.raises(ValueError, match=r"\w+ \w+ \w+"):
            case.use(model, tokenizer)
    else:
        case.use(model, tokenizer)


@every_kind
@every_case
def test_the_model_is_as_it_was(case, kind, tokenizer, ids):
    model = tiny_model(kind, seed=1).eval()
    before = picture(model, ids)
    random_state = torch.get_rng_state()
    used(case, kind, model, tokenizer)
    assert torch.equal(random_state, torch.get_rng_state()), "the global generator was used"
    assert_same(before, picture(model, ids))


@every_case
def test_the_model_is_as_it_was_after_a_failure_inside_it(case, tokenizer, ids):
    kind = next(kind for kind in KINDS if kind not in case.refuses)
    model = tiny_model(kind, seed=1).eval()
    before = picture(model, ids)
    calls = 0

    def fail(module, given, returned):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Broken

    handle = model.get_output_embeddings().register_forward_hook(fail)
    try:
        case.use(model, tokenizer)
    except Broken:
        pass
    finally:
        handle.remove()
    assert_same(before, picture(model, ids))


@every_case
def test_the_same_seed_gives_the_same(case, tokenizer):
    kind = next(kind for kind in KINDS if kind not in case.refuses)
    model = tiny_model(kind, seed=2).eval()
    first, second = case.use(model, tokenizer), case.use(model, tokenizer)
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second
