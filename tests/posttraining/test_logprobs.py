"""Log-probabilities of tokens: those of a plain log-softmax, with its gradient, on every kind of model, and never a block of tokens times vocabulary."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cameraready.posttraining import _logprobs
from cameraready.posttraining._logprobs import completion_logprobs, token_logprobs

pytestmark = pytest.mark.torch


def plain(logits, targets, temperature=1.0):
    """Log-probabilities and entropies the way a textbook writes them."""
    exact = torch.promote_types(logits.dtype, torch.float32)
    logps = torch.log_softmax(logits.to(exact) / temperature, -1)
    entropies = -torch.special.xlogy(logps.exp(), logps.exp()).sum(-1)
    return logps.gather(-1, targets.clamp_min(0)[..., None])[..., 0], entropies


def drawn(*shape, vocabulary=23, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(*shape, vocabulary, generator=generator, dtype=torch.float64)).to(dtype)
    return logits, torch.randint(vocabulary, shape, generator=generator)


# --- from logits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_it_is_the_log_softmax_of_the_target(dtype, shape, chunk):
    logits, targets = drawn(*shape, dtype=dtype)
    logits.requires_grad_(True)
    found = token_logprobs(logits, targets, temperature=0.6, chunk=chunk, entropy=True)
    wanted = plain(logits, targets, 0.6)
    weights = torch.linspace(-1, 2, targets.numel()).view(shape)
    gradient, same = (
        torch.autograd.grad((weights * logps).sum() + (weights.cos() * entropies).sum(), logits)[0]
        for logps, entropies in (found, wanted)
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == shape
        assert ours.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert gradient.dtype == dtype
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(gradient, same, rtol=rounding, atol=rounding)


def test_its_gradient_is_that_of_small_differences():
    logits, targets = drawn(2, 3, vocabulary=5)
    targets[1, 1] = -100
    logits.requires_grad_(True)
    assert torch.autograd.gradcheck(
        lambda x: token_logprobs(x, targets, temperature=1.7, chunk=2, entropy=True), logits
    )


def test_a_slice_of_logits_is_read_in_place():
    logits, targets = drawn(3, 9)
    logits.requires_grad_(True)
    slices = logits[:, 2:-1], logits.transpose(0, 1)[1:-2]
    for part in slices:
        wanted = targets[:, 2:-1] if part.shape[0] == 3 else targets.T[1:-2]
        found = token_logprobs(part, wanted, chunk=4, entropy=True)
        same = plain(part, wanted)
        for ours, theirs in zip(found, same, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        gradients = [torch.autograd.grad(pair[0].sum() + pair[1].sum(), logits)[0] for pair in (found, same)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_masked_vocabulary_is_a_smaller_one():
    logits, targets = drawn(4, 6)
    allowed = torch.arange(23) % 3 != 1
    targets = targets.where(allowed[targets], 0)
    masked = logits.masked_fill(~allowed, -math.inf).requires_grad_(True)
    smaller = logits[..., allowed].requires_grad_(True)
    renamed = allowed.cumsum(0)[targets] - 1
    found, wanted = token_logprobs(masked, targets, entropy=True), token_logprobs(smaller, renamed, entropy=True)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert ours.isfinite().all()
    for logps, entropies in (found, wanted):
        (logps.sum() + 2 * entropies.sum()).backward()
    torch.testing.assert_close(masked.grad[..., allowed], smaller.grad, rtol=1e-12, atol=1e-12)
    assert (masked.grad[..., ~allowed] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_target_of_probability_0_hurts_nobody_else(dtype):
    logits, targets = drawn(2, 5, dtype=dtype)
    alone = logits.clone().requires_grad_(True)
    logits[1, 2, targets[1, 2]] = -math.inf
    logits.requires_grad_(True)
    found = token_logprobs(logits, targets, entropy=True)
    assert found.logps[1, 2] == -math.inf
    assert found.entropies.isfinite().all()
    (found.logps.sum() + found.entropies.sum()).backward()
    assert logits.grad.isfinite().all()
    same = token_logprobs(alone, targets, entropy=True)
    (same.logps.sum() + same.entropies.sum()).backward()
    others = torch.ones(2, 5, dtype=torch.bool)
    others[1, 2] = False
    assert torch.equal(found.logps[others], same.logps[others])
    assert torch.equal(logits.grad[others], alone.grad[others])


def test_a_certain_token_has_log_probability_0_and_no_entropy():
    logits = torch.full((1, 2, 4), -math.inf)
    logits[0, :, 1] = 2.0
    logits.requires_grad_(True)
    found = token_logprobs(logits, torch.ones(1, 2, dtype=torch.long), entropy=True)
    assert found.logps.tolist() == [[0.0, 0.0]]
    assert found.entropies.tolist() == [[0.0, 0.0]]
    (found.logps.sum() + found.entropies.sum()).backward()
    assert logits.grad.abs().max() == 0


def test_a_uniform_distribution_over_150000_words_has_the_entropy_of_their_number():
    found = token_logprobs(torch.zeros(2, 151_936, dtype=torch.bfloat16), torch.tensor([0, 151_935]), entropy=True)
    assert found.logps.tolist() == pytest.approx([-math.log(151_936)] * 2, rel=1e-6)
    assert found.entropies.tolist() == pytest.approx([math.log(151_936)] * 2, rel=1e-6)


def test_minus_100_is_skipped_whatever_its_logits_are():
    logits, targets = drawn(2, 4)
    targets[0, 1], targets[1, 3] = -100, -100
    logits[0, 1], logits[1, 3] = math.nan, -math.inf
    logits.requires_grad_(True)
    found = token_logprobs(logits, targets, entropy=True)
    for values in found:
        assert values[targets == -100].tolist() == [0.0, 0.0]
        assert values.isfinite().all()
    (found.logps.sum() + found.entropies.sum()).backward()
    assert (logits.grad[targets == -100] == 0).all()
    assert logits.grad.isfinite().all()


def test_rounding_of_half_precision_comes_before_the_sum_and_not_after():
    # A bfloat16 log-softmax knows log-probabilities to three digits; the logits' own values know them to seven.
    logits, targets = drawn(40, vocabulary=5000, dtype=torch.bfloat16)
    wanted = plain(logits.double(), targets)[0]
    error = (token_logprobs(logits, targets).logps - wanted).abs().max()
    rounded = (logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] - wanted).abs().max()
    assert error < 1e-5 < rounded


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"targets": torch.tensor([0, 23])}, "targets go from 0 to 23.*ids 0 to 22"),
        ({"targets": torch.tensor([-1, 3])}, "targets go from -1 to 3"),
        ({"targets": torch.tensor([0.0, 3.0])}, "whole numbers"),
        ({"targets": torch.tensor([0])}, "must be the logits' shape"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": math.nan}, "temperature must be above 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"logits": torch.zeros(2, 0)}, "with V > 0"),
        ({"logits": torch.zeros(2, 23, dtype=torch.long)}, "must be floating"),
        ({"logits": torch.zeros(23), "targets": torch.tensor(3)}, "must be floating"),
    ],
)
def test_what_cannot_be_scored_is_refused(change, match):
    given = {"logits": drawn(2)[0], "targets": torch.tensor([0, 22])} | change
    with pytest.raises(ValueError, match=match):
        token_logprobs(given.pop("logits"), given.pop("targets"), **given)


def test_targets_of_any_whole_number_type_are_read():
    logits, targets = drawn(2, 5)
    wanted = token_logprobs(logits, targets).logps
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(token_logprobs(logits, targets.to(dtype)).logps, wanted)
    with pytest.raises(TypeError, match="chunk must be a whole number"):
        token_logprobs(logits, targets, chunk=1.5)


def test_no_tokens_have_no_scores():
    logits = torch.zeros(2, 0, 7, requires_grad=True)
    found = token_logprobs(logits, torch.zeros(2, 0, dtype=torch.long))
    assert found.logps.shape == (2, 0)
    found.logps.sum().backward()
    assert logits.grad.shape == (2, 0, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_trl_says_the_same(dtype):
    pytest.importorskip("trl")
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    logits, targets = drawn(3, 6, dtype=dtype)
    found = token_logprobs(logits, targets, temperature=0.9, entropy=True)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        found.logps, selective_log_softmax(logits / 0.9, targets), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(found.entropies, entropy_from_logits(logits / 0.9), rtol=tolerance, atol=tolerance)


# --- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Entries of the largest floating tensor of memory of its own that any operation returns."""

    def __init__(self, ignored=()):
        super().__init__()
        self.entries, self.ignored = 0, {tuple(shape) for shape in ignored}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for part in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(part, torch.Tensor) and part.is_floating_point() and tuple(part.shape) not in self.ignored:
                self.entries = max(self.entries, part.numel())
        return found


def saved_for_backward(run):
    """Every tensor that autograd keeps of what `run` does, and its outcome."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outcome = run()
    return kept, outcome


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_logits_themselves_are_kept_for_the_backward_pass(dtype):
    logits, targets = drawn(4, 50, vocabulary=1000, dtype=dtype)
    logits.requires_grad_(True)
    kept, _ = saved_for_backward(lambda: token_logprobs(logits, targets, chunk=8, entropy=True))
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() > 200] == [logits.data_ptr()]
    usual, _ = saved_for_backward(lambda: plain(logits, targets))
    assert sum(tensor.numel() >= 4 * 50 * 1000 for tensor in usual) >= 2


def test_beyond_their_gradient_only_a_chunk_of_logits_is_ever_made():
    logits, targets = drawn(4, 50, vocabulary=1000, dtype=torch.bfloat16)
    logits.requires_grad_(True)
    with Largest(ignored=[(4, 50, 1000), (200, 1000)]) as seen:  # the gradient, and views of both
        found = token_logprobs(logits, targets, chunk=8, entropy=True)
        (found.logps.sum() + found.entropies.sum()).backward()
    assert seen.entries == 8 * 1000
    with Largest(ignored=[(4, 50, 1000), (4, 40, 1000)]) as seen, torch.no_grad():
        token_logprobs(logits[:, :40], targets[:, :40], chunk=8, entropy=True)
    assert seen.entries <= 40 * 1000  # a view of one row


def test_by_default_a_block_takes_64_mib(monkeypatch):
    assert _logprobs.chunk_size(None, 151_936) * 151_936 * 4 <= 64 * 2**20
    monkeypatch.setattr(_logprobs, "LARGEST", 3 * 23)
    logits, targets = drawn(20)
    with Largest(ignored=[(20, 23)]) as seen:
        token_logprobs(logits, targets, entropy=True)
    assert seen.entries == 3 * 23


def test_the_logits_of_a_completion_never_exist_at_once():
    from cameraready.models import tiny_model

    vocabulary, length = 151_936, 24
    model = tiny_model("qwen3", vocab=vocabulary, hidden=16, heads=2, tie=True)
    ids = torch.randint(vocabulary, (2, length + 2), generator=torch.Generator().manual_seed(0))
    weights = [(vocabulary, 16), (16, vocabulary)]  # of embedding and head, and their gradients

    def run():
        return completion_logprobs(model, ids, None, length, chunk=3, entropy=True)

    completion_logprobs(model, ids[:, :4], None, 2)  # looking at the model is over
    with Largest(ignored=weights) as seen:
        kept, found = saved_for_backward(run)
        (found.logps.sum() + found.entropies.sum()).backward()
    assert seen.entries == 3 * vocabulary
    assert max(tensor.numel() for tensor in kept if tuple(tensor.shape) not in weights) < vocabulary
    assert model.lm_head.weight.grad.shape == (vocabulary, 16)
