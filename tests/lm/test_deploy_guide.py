"""The guide "Before you deploy": its code does on a model what the page says, and its numbers are the shipped results."""

import re
from pathlib import Path

import pytest
import torch

from cameraready.models import open_model, tiny_model, tiny_tokenizer
from tests.guides import measured_lines, not_shown
from tests.lm.conftest import assert_clean

pytestmark = pytest.mark.torch

GUIDE = Path(__file__).parents[2] / "docs" / "before-you-deploy.md"
QWEN = "qwen2.5-coder-0.5b-instruct"


@pytest.fixture(scope="module")
def names():
    """What the page's blocks leave behind, run in order on a tiny model in the place of the hub's."""
    model = open_model((tiny_model("qwen2", seed=0, max_positions=2048), tiny_tokenizer()))
    left = {"opened": model}
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(re.sub(r'open_model\("hf:[^"]*"\)', "opened", code), left)
    return left


def test_the_model_is_left_as_it_was(names):
    assert_clean(names["model"])
    assert all(
        torch.equal(value, tiny_model("qwen2", seed=0, max_positions=2048).state_dict()[name])
        for name, value in names["model"].state_dict().items()
    )


def test_a_pruned_cache_is_a_tenth_and_knows_what_was_read(names):
    length = names["context"].shape[1]
    assert names["whole"].get_seq_length() == names["small"].get_seq_length() == length
    assert names["small"].layers[0].keys.shape[2] == int(length * (1 - 0.9))
    assert names["answer"].shape[1] == length + 4


def test_draws_are_eight_with_their_probabilities(names):
    draws = names["draws"]
    assert draws.sequences.shape[0] == draws.logprobs.shape[0] == len(names["texts"]) == 8
    assert (draws.logprobs <= 0).all()


def test_the_transformed_model_computes_the_same_and_the_quantised_one_nearly(names):
    ids, model = names["context"][:, :64], names["model"]
    assert names["changed"] < 1e-3
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(names["plain"](ids).logits, logits, rtol=0, atol=1e-3)
        error = (names["predictions"] - logits).std() / logits.std()
        assert 0.01 < error < 1


def test_the_watermark_is_found(names):
    plan, found = names["plan"], names["found"]
    assert plan.least_power >= 0.9 - 1e-6
    assert found.scored[0] >= plan.shortest
    assert found.p_value[0] < plan.alpha


#: Headings of the page, and the verdicts whose estimates stand under them.
MEASURED = {
    "Would it answer as well with a part of its cache?": (
        "capkv",
        [*((label, QWEN) for label in ("3a", "3b", "3d", "6a", "6b")), ("8a", "shapes")],
    ),
    "Would it find more if it explored?": (
        "led",
        [("3b", "chains"), ("7", "chains"), *((label, QWEN) for label in ("3c", "3d", "5a", "11a"))],
    ),
    "What would four bits cost?": (
        "fptquant",
        [*((label, "trained-llama") for label in ("2e", "2f", "2h", "4a")), *((label, QWEN) for label in ("3b", "7a", "7c"))],
    ),
    "Would a watermark be found, and what would it cost?": (
        "watermark_power",
        [*((label, QWEN) for label in ("3c", "4c", "4d")), ("8a", "human-text"), ("8b", "human-text")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("heading", MEASURED)
def test_every_number_is_a_shipped_result_with_its_verdict(heading):
    method, wanted = MEASURED[heading]
    lines = measured_lines(GUIDE, heading)
    assert len(lines) == len(wanted)
    assert not_shown(lines, f"cameraready.lm.{method}", wanted) == []
