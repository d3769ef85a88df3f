"""Nats per token after a prefix, equal to the loss of one pass over everything, also for caches and pruned ones; pass@k by counting."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from cameraready.lm import _scoring
from cameraready.lm._scoring import negative_log_likelihood, pass_at_k, perplexity_after
from tests.lm.conftest import assert_clean

pytestmark = pytest.mark.torch

KINDS = ("llama", "qwen2", "qwen3", "gemma3", "mistral", "phi3", "gpt_neox")
PREFIX = 20


@pytest.fixture(params=KINDS)
def model(request, tiny):
    found = tiny(request.param)
    yield found
    assert_clean(found)


@pytest.fixture
def ids(tokenizer):
    rows = ["What is kept, and what goes? Nobody knows today.", "The other row of the batch is as long as the fir"]
    return tokenizer(rows, add_special_tokens=False, return_tensors="pt").input_ids


def whole_pass(model, ids):
    """Loss of each row on what follows the first token of the suffix."""
    with torch.no_grad():
        logits = model(ids).logits.float()
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses[:, PREFIX:].mean(1)


def cache_of(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=True).past_key_values


def layers_of(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


@pytest.mark.parametrize("chunk", [None, 1, 3, 1000])
def test_it_is_the_loss_of_one_pass_over_everything(model, ids, chunk):
    found = perplexity_after(model, ids[:, :PREFIX], ids[:, PREFIX:], chunk=chunk)
    assert found.shape == (2,)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole_pass(model, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_cache_gives_the_same_as_its_tokens_and_is_left_as_it_was(model, ids, chunk):
    cache = cache_of(model, ids[:, :PREFIX])
    before = layers_of(cache)
    found = perplexity_after(model, cache, ids[:, PREFIX:], chunk=chunk)
    torch.testing.assert_close(found, whole_pass(model, ids), rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == PREFIX
    for (keys, values), (after_keys, after_values) in zip(before, layers_of(cache), strict=True):
        assert torch.equal(keys, after_keys)
        assert torch.equal(values, after_values)


def test_without_a_prefix_it_is_the_loss_of_the_text(model, ids):
    with torch.no_grad():
        wanted = cross_entropy(model(ids).logits.float()[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    torch.testing.assert_close(perplexity_after(model, ids[:, :0], ids), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_pruned_cache_is_a_cache_whose_dropped_tokens_cannot_be_seen(tiny, ids, kind):
    model = tiny(kind)
    kept = torch.tensor([0, 1, 5, 6, 7, 11, 18, 19])
    pruned = cache_of(model, ids[:, :PREFIX])
    for layer in pruned.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    found = perplexity_after(model, pruned, ids[:, PREFIX:], position=PREFIX)
    # The same by a mask over the whole cache, at the true positions.
    mask = torch.zeros(2, ids.shape[1], dtype=torch.long)
    mask[:, kept] = 1
    mask[:, PREFIX:] = 1
    cache, given = cache_of(model, ids[:, :PREFIX]), _scoring._takes(model, "cache")
    with torch.no_grad():
        logits = model(
            ids[:, PREFIX:],
            attention_mask=mask,
            position_ids=torch.arange(PREFIX, ids.shape[1]).expand(2, -1),
            **{"cache" if given else "past_key_values": cache},
        ).logits.float()
    wanted = cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, PREFIX + 1 :], reduction="none").mean(1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # Without the position it would be another number.
    assert not torch.allclose(perplexity_after(model, copy.deepcopy(pruned), ids[:, PREFIX:]), wanted, atol=1e-3)


def test_rows_of_a_batch_do_not_mix(tiny, ids):
    model = tiny("qwen3")
    both = perplexity_after(model, ids[:, :PREFIX], ids[:, PREFIX:])
    each = [perplexity_after(model, row[None, :PREFIX], row[None, PREFIX:]) for row in ids]
    torch.testing.assert_close(both, torch.cat(each), rtol=1e-4, atol=1e-4)


def test_bfloat16_agrees_with_float32_to_its_precision(ids):
    from cameraready.models import tiny_model

    exact = perplexity_after(tiny_model("llama").eval(), ids[:, :PREFIX], ids[:, PREFIX:])
    coarse = perplexity_after(tiny_model("llama", dtype=torch.bfloat16).eval(), ids[:, :PREFIX], ids[:, PREFIX:])
    assert coarse.dtype == torch.float32
    assert (coarse - exact).abs().max() < 0.05 * exact.max()


class Largest(TorchDispatchMode):
    """Entries of the largest float32 tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for part in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(part, torch.Tensor) and part.dtype == torch.float32:
                self.entries = max(self.entries, part.numel())
        return found


def test_only_a_block_of_logits_is_ever_held_in_float32(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 30, 100, generator=generator)).to(torch.bfloat16)
    targets = torch.randint(100, (2, 30), generator=generator)
    monkeypatch.setattr(_scoring, "LARGEST", 700)
    with Largest() as seen:
        found = negative_log_likelihood(logits, targets)
    assert 60 <= seen.entries <= 700
    wanted = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_forward_pass_makes_no_more_logits_than_that(monkeypatch, tiny, ids):
    model = tiny("llama")
    sizes = []
    handle = model.get_output_embeddings().register_forward_hook(lambda module, given, made: sizes.append(made.numel()))
    monkeypatch.setattr(_scoring, "LARGEST", 2 * 262 * 4)
    try:
        found = perplexity_after(model, ids[:, :PREFIX], ids[:, PREFIX:])
    finally:
        handle.remove()
    assert max(sizes) <= 2 * 262 * 4
    torch.testing.assert_close(found, whole_pass(model, ids), rtol=1e-4, atol=1e-4)


def test_shapes_that_do_not_fit_are_refused(tiny, ids):
    model = tiny("llama")
    with pytest.raises(ValueError, match="at least two tokens"):
        perplexity_after(model, ids[:, :5], ids[:, 5:6])
    with pytest.raises(ValueError, match="at least two tokens"):
        perplexity_after(model, ids[:, :5], ids[0])
    with pytest.raises(ValueError, match="of one B"):
        perplexity_after(model, ids[:1, :5], ids[:, 5:])


# --- pass@k ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations(range(n), k))
        share = sum(any(sample < correct for sample in draw) for draw in draws) / len(draws)
        assert pass_at_k(n, correct, k) == pytest.approx(share, abs=1e-14)


def test_pass_at_k_is_unbiased():
    # Over the binomial number of right samples its mean is the chance that one of k independent samples is right.
    from scipy.stats import binom

    for n, k, chance in ((10, 3, 0.2), (64, 16, 0.03), (200, 100, 0.01)):
        correct = np.arange(n + 1)
        mean = (binom.pmf(correct, n, chance) * pass_at_k(n, correct, k)).sum()
        assert mean == pytest.approx(1 - (1 - chance) ** k, rel=1e-10)


def test_pass_at_k_of_many_problems_at_once():
    n = np.array([[10], [2000]])
    correct = np.array([0, 1, 5])
    found = pass_at_k(n, correct, 5)
    assert found.shape == (2, 3)
    assert found[:, 0].tolist() == [0.0, 0.0]
    assert found[0, 1] == pytest.approx(0.5)
    assert found[1, 1] == pytest.approx(5 / 2000, rel=1e-12)
    assert str(pass_at_k(4, 0, 2)) == "0.0"


@pytest.mark.parametrize(
    ("n", "correct", "k", "error"),
    [
        (4, 5, 1, ValueError),
        (4, -1, 1, ValueError),
        (4, 1, 5, ValueError),
        (4, 1, 0, ValueError),
        (4.0, 1, 1, TypeError),
    ],
)
def test_impossible_counts_are_refused(n, correct, k, error):
    with pytest.raises(error, match=r"\w+ must be"):
        pass_at_k(n, correct, k)
