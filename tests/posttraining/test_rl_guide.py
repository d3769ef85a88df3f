"""The guide "Reading an RL run": its code does on a model what the page says, and its numbers are the shipped results."""

import re
from pathlib import Path

import pytest

from cameraready.models import open_model, tiny_model, tiny_tokenizer
from tests.guides import measured_lines, not_shown

pytestmark = pytest.mark.torch
pytest.importorskip("trl")

GUIDE = Path(__file__).parents[2] / "docs" / "reading-an-rl-run.md"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the page's blocks leave behind, run in order on a tiny model in the place of the hub's."""
    folder = tmp_path_factory.mktemp("guide")
    left = {"opened": open_model((tiny_model("qwen2", seed=0, max_positions=2048), tiny_tokenizer()))}
    for code in re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL):
        code = re.sub(r'open_model\("hf:[^"]*"\)', "opened", code)
        code = code.replace('-run", **settings', '-run", use_cpu=True, save_strategy="no", **settings')
        exec(re.sub(r'GRPOConfig\("(\w+)-run"', rf'GRPOConfig("{folder}/\1"', code), left)
    return left


def test_every_step_is_logged_with_its_entropy_and_divergence(names):
    assert [row["step"] for row in names["steps"]] == [1, 2, 3, 4]
    assert all(row["entropy"] > 0 for row in names["steps"])
    first, last = names["steps"][::2], names["steps"][1::2]
    assert [row["band/kl"] for row in first] == [0, 0], "nothing is spent before the first step on a batch"
    assert names["spent"] == sum(row["band/kl"] for row in last) >= 0


def test_clips_are_told_by_old_probability(names):
    assert names["up"]
    assert all(0 <= share <= 1 for share in names["up"].values())


def test_every_prompt_of_the_pool_has_a_difficulty(names):
    assert names["difficulty"].shape == (len(names["sums"]),)


def test_the_estimate_of_pass_at_k_is_that_of_all_subsets(names):
    from itertools import combinations

    results = [1] * names["c"] + [0] * (names["n"] - names["c"])
    found = [any(some) for some in combinations(results, names["k"])]
    assert names["pass_at_k"] == pytest.approx(sum(found) / len(found))


def test_attempts_have_their_own_credit_and_solved_rates_only_grow(names):
    assert names["advantages"].shape == names["rewards"].shape
    values = [rate.value for rate in names["rates"]]
    assert values == [0.25, 0.5, 0.75]


def test_an_untrained_model_is_advised_the_log_likelihood(names):
    assert names["prior"].mean < 0.1
    assert names["advice"].name == "nll"


#: Headings of the page, and the verdicts whose estimates stand under them.
WORLD, QWEN = "continuum", "qwen2.5-coder-0.5b-instruct"
MEASURED = {
    "Is there anything to learn from?": ("paced", [(label, "many-answers") for label in ("3a", "3c", "7d", "11a", "11b", "1a")]),
    "Entropy": (
        "bandpo",
        [("7a", "two-strategies"), ("7a", "many-answers"), *((label, "two-strategies") for label in ("8a", "8c", "8d")), ("10a", "bounds")],
    ),
    "pass@k": ("paced", [(label, "many-answers") for label in ("8c", "6d", "6a")]),
    "Several attempts": ("cal_grpo", [("2d", "maze"), ("3a", "maze"), ("3b", "hidden"), ("4a", "hidden"), ("5c", "ask")]),
    "Before RL: demonstrations": (
        "sft_objectives",
        [*((label, WORLD) for label in ("9a", "2a", "14", "11a", "11c", "11d")), ("12a", QWEN), ("12b", QWEN)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("heading", MEASURED)
def test_every_number_is_a_shipped_result_with_its_verdict(heading):
    method, wanted = MEASURED[heading]
    lines = measured_lines(GUIDE, heading)
    assert len(lines) == len(wanted)
    assert not_shown(lines, f"cameraready.posttraining.{method}", wanted) == []
