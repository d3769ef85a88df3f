"""`completion_logprobs` against the plain logits of every kind of model, wrapped, padded, in training, and summed over micro-batches."""

import pytest
import torch

from cameraready.models.tiny import TINY_KINDS
from cameraready.posttraining._logprobs import completion_logprobs, masked_mean, positions_of

pytestmark = pytest.mark.torch
LENGTH = 9


def model_of(kind="llama", **options):
    from cameraready.models import tiny_model

    return tiny_model(kind, **options)


def batch():
    """Three rows: padded on the left, on the right, and not at all."""
    ids = torch.randint(0, 256, (3, 22), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6], mask[1, -3:] = 0, 0
    return ids, mask


def plainly(model, ids, mask, temperature=1.0, length=LENGTH, **options):
    """From all logits; 0 where there is padding."""
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions_of(mask), **options).logits
    logits = logits[:, -length - 1 : -1].to(torch.promote_types(logits.dtype, torch.float32))
    logps = torch.log_softmax(logits / temperature, -1)
    kept = mask[:, -length:] != 0
    entropies = -(logps.exp() * logps).sum(-1)
    chosen = logps.gather(-1, ids[:, -length:, None])[..., 0]
    return chosen.where(kept, 0.0), entropies.where(kept, 0.0)


def gradients_of(model, scores):
    logps, entropies = scores
    weights = torch.linspace(-1, 2, logps.numel(), dtype=logps.dtype).view_as(logps)
    ((weights * logps).sum() + (weights.cos() * entropies).sum()).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(ours, theirs, tolerance):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def assert_same_gradients(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    assert ours
    for name, wanted in theirs.items():
        assert (ours[name] - wanted).abs().max() <= tolerance * max(float(wanted.abs().max()), 1e-3), name


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_it_equals_the_plain_way(kind):
    from cameraready.models.hooks import hooks_of

    model, (ids, mask) = model_of(kind), batch()
    theirs = plainly(model, ids, mask, 0.7)
    wanted = gradients_of(model, theirs)
    ours = completion_logprobs(model, ids, mask, LENGTH, temperature=0.7, chunk=4, entropy=True)
    assert_same(ours, theirs, 5e-6)
    assert_same_gradients(gradients_of(model, ours), wanted, 5e-6)
    assert hooks_of(model) == 0
    with torch.no_grad():
        again = completion_logprobs(model, ids, mask, LENGTH, temperature=0.7, chunk=100, entropy=True)
    assert_same(again, ours, 5e-6)


@pytest.mark.parametrize("kind", [kind for kind in TINY_KINDS if kind != "gemma2"])
def test_it_equals_the_plain_way_to_the_last_digits(kind):
    # Eager attention of transformers has no float64 masks for rows of padding, which gemma2 needs.
    model, (ids, mask) = model_of(kind, dtype=torch.float64), batch()
    theirs = plainly(model, ids, mask, 1.3)
    wanted = gradients_of(model, theirs)
    ours = completion_logprobs(model, ids, mask, LENGTH, temperature=1.3, chunk=5, entropy=True)
    assert ours.logps.dtype == torch.float64
    assert_same(ours, theirs, 1e-12)
    assert_same_gradients(gradients_of(model, ours), wanted, 1e-12)


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_softcaps_and_scales_of_the_logits_matter_here(kind):
    # So that the test above is one of them: without what stands behind the head the numbers are others.
    from cameraready.models import anatomy

    model, (ids, mask) = model_of(kind), batch()
    hidden = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _module, given: hidden.append(given[0]))
    with torch.no_grad():
        wanted, _ = plainly(model, ids, mask)
    handle.remove()
    logps = model.get_output_embeddings()(hidden[0])[:, -LENGTH - 1 : -1].log_softmax(-1)
    bare = logps.gather(-1, ids[:, -LENGTH:, None])[..., 0] * mask[:, -LENGTH:]
    assert (bare - wanted).abs().max() > 0.1
    assert anatomy(model).finish


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_padding_changes_nothing(kind):
    model, (ids, mask) = model_of(kind), batch()
    with torch.no_grad():
        together = completion_logprobs(model, ids, mask, LENGTH, entropy=True)
        for row in range(3):
            kept = mask[row].bool()
            length = int(mask[row, -LENGTH:].sum())
            alone = completion_logprobs(model, ids[row : row + 1, kept], None, length, entropy=True)
            for one, many in zip(alone, together, strict=True):
                torch.testing.assert_close(many[row, mask[row, -LENGTH:].bool()], one[0], rtol=1e-5, atol=1e-5)


def test_padding_has_no_scores_and_no_gradient():
    model, (ids, mask) = model_of(tie=False), batch()
    found = completion_logprobs(model, ids, mask, LENGTH, entropy=True)
    padded = mask[:, -LENGTH:] == 0
    assert (found.logps[padded] == 0).all()
    assert (found.entropies[padded] == 0).all()
    (found.logps * padded).sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_a_batch_of_padding_alone_still_has_a_graph():
    model, (ids, mask) = model_of(), batch()
    mask[:, -LENGTH:] = 0
    found = completion_logprobs(model, ids, mask, LENGTH)
    assert (found.logps == 0).all()
    found.logps.sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "granite"])
def test_half_precision_is_upcast_before_the_softmax(kind, dtype):
    model, (ids, mask) = model_of(kind, dtype=dtype), batch()
    with torch.no_grad():
        found = completion_logprobs(model, ids, mask, LENGTH, chunk=4, entropy=True)
        wanted = plainly(model, ids, mask)
    assert found.logps.dtype == torch.float32
    # The head's products are rounded to half precision in either way, and may fall to neighbouring values.
    spacing = 2 ** (-8 if dtype == torch.bfloat16 else -11)
    assert_same(found, wanted, 16 * spacing)
    assert (found.logps - wanted[0]).abs().mean() < 2 * spacing


def test_dropout_is_drawn_once_as_in_the_plain_way():
    model, (ids, mask) = model_of(), batch()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    outcomes = []
    for way in (plainly, completion_logprobs):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            scores = (
                way(model, ids, mask, length=LENGTH) if way is plainly else way(model, ids, mask, LENGTH, entropy=True)
            )
            outcomes.append((scores, gradients_of(model, scores)))
    assert_same(outcomes[1][0], outcomes[0][0], 5e-6)
    assert_same_gradients(outcomes[1][1], outcomes[0][1], 5e-6)
    assert model.training
    still = completion_logprobs(model.eval(), ids, mask, LENGTH)
    assert (still.logps - outcomes[0][0][0]).abs().max() > 0.1


@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "granite"])
def test_adapters_are_seen_and_trained(kind, target_modules):
    peft = pytest.importorskip("peft")
    base = model_of(kind, tie=False)
    config = peft.LoraConfig(
        r=3, target_modules=target_modules, lora_dropout=0.3, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bare, _ = plainly(base, *batch())
        model = peft.get_peft_model(base, config).train()
        ids, mask = batch()
        outcomes = []
        for way in (plainly, completion_logprobs):
            torch.manual_seed(5)
            if way is plainly:
                scores = plainly(model, ids, mask)
            else:  # one chunk, so that dropout in the head draws what it draws in the plain way
                scores = completion_logprobs(model, ids, mask, LENGTH, chunk=1000, entropy=True)
            outcomes.append((scores, gradients_of(model, scores)))
    if "lm_head" not in target_modules:
        assert_same(outcomes[1][0], outcomes[0][0], 5e-6)
        assert_same_gradients(outcomes[1][1], outcomes[0][1], 5e-6)
    assert all("lora" in name for name in outcomes[1][1])
    assert (outcomes[1][0].logps - bare).abs().max() > 0.1
    model.eval()
    scores = completion_logprobs(model, ids, mask, LENGTH, chunk=4, entropy=True)
    wanted = plainly(model, ids, mask)
    assert_same(scores, wanted, 5e-6)
    assert_same_gradients(gradients_of(model, scores), gradients_of(model, wanted), 5e-6)
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(completion_logprobs(model, ids, mask, LENGTH).logps, bare, rtol=5e-6, atol=5e-6)


def test_a_head_that_peft_trains_whole():
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(
            model_of(tie=False), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    ids, mask = batch()
    scores, wanted = completion_logprobs(model, ids, mask, LENGTH, entropy=True), plainly(model, ids, mask)
    assert_same(scores, wanted, 5e-6)
    gradients = gradients_of(model, scores)
    assert any("modules_to_save" in name for name in gradients)
    assert_same_gradients(gradients, gradients_of(model, wanted), 5e-6)


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
def test_prompts_that_are_tuned_stand_in_front():
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(model_of(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    ids, mask = batch()
    wanted = plainly(model, ids, mask)
    found = completion_logprobs(model, ids, mask, LENGTH, chunk=4, entropy=True)
    assert_same(found, wanted, 5e-6)
    assert_same_gradients(gradients_of(model, found), gradients_of(model, wanted), 5e-6)


@pytest.fixture
def accelerator_of():
    """``accelerator_of(mixed_precision)``; accelerate's state, which all of a process share, is as new, and afterwards as it was."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    kept = [(kind, dict(kind._shared_state)) for kind in (AcceleratorState, GradientState, PartialState)]
    for kind, _ in kept:
        kind._shared_state.clear()
    yield lambda precision: accelerate.Accelerator(cpu=True, mixed_precision=precision)
    for kind, state in kept:
        kind._shared_state.clear()
        kind._shared_state.update(state)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_that_accelerate_prepared(accelerator_of, precision):
    model, (ids, mask) = model_of(), batch()
    exact = plainly(model, ids, mask)
    prepared = accelerator_of(precision).prepare(model)
    wanted = plainly(prepared, ids, mask)
    theirs = gradients_of(prepared, wanted)
    found = completion_logprobs(prepared, ids, mask, LENGTH, chunk=4, entropy=True)
    tolerance = 5e-6 if precision == "no" else 16 * 2**-8
    assert_same(found, wanted, tolerance)
    assert_same_gradients(gradients_of(prepared, found), theirs, tolerance)
    if precision == "bf16":  # the head ran in the precision that was asked for, inside the wrapper
        assert (found.logps - exact[0]).abs().max() > 1e-3


def test_data_parallelism_gathers_the_gradients(tmp_path):
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model, (ids, mask) = model_of("gemma3"), batch()
        wanted = gradients_of(model, plainly(model, ids, mask))
        wrapped = DistributedDataParallel(model)
        for _ in range(2):  # a second pass fails where the first one left the reducer waiting
            scores = completion_logprobs(wrapped, ids, mask, LENGTH, chunk=4, entropy=True)
            found = gradients_of(wrapped, scores)
            assert_same_gradients({name.removeprefix("module."): g for name, g in found.items()}, wanted, 5e-6)
    finally:
        torch.distributed.destroy_process_group()


def test_layers_that_run_again_in_the_backward_pass():
    model, (ids, mask) = model_of("qwen3"), batch()
    model.train()
    wanted = gradients_of(model, plainly(model, ids, mask))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = completion_logprobs(model, ids, mask, LENGTH, chunk=4, entropy=True)
    assert_same_gradients(gradients_of(model, found), wanted, 5e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("per", ["token", "sequence", "constant"])
def test_micro_batches_of_unequal_lengths_add_up_to_the_whole(per, dtype, tolerance):
    model, (ids, mask) = model_of(dtype=dtype), batch()
    mask[1, -7:] = 0
    kept = mask[:, -LENGTH:].bool()
    total = {"token": kept.sum(), "sequence": 3, "constant": 3 * LENGTH}[per]

    def loss(rows, columns):
        scores = completion_logprobs(model, ids[rows, columns:], mask[rows, columns:], LENGTH, chunk=3, entropy=True)
        return masked_mean(scores.logps.exp() - 0.1 * scores.entropies, kept[rows], per=per, total=total)

    whole = loss(slice(None), 0)
    whole.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    parts = [loss(slice(0, 1), 6), loss(slice(1, 3), 0)]  # the first row without its padding
    for part in parts:
        part.backward()
    assert sum(parts).item() == pytest.approx(whole.item(), rel=tolerance, abs=tolerance)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=tolerance, atol=tolerance)
    if per != "constant":  # without `total` the sum of means is another number
        separate = sum(
            masked_mean(scores.logps, kept[rows], per=per)
            for rows in (slice(0, 1), slice(1, 3))
            for scores in [completion_logprobs(model, ids[rows], mask[rows], LENGTH)]
        )
        together = masked_mean(completion_logprobs(model, ids, mask, LENGTH).logps, kept, per=per)
        assert abs((separate - together).item()) > 0.1


# --- what cannot be scored -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"completion_length": 0}, "from 1 to T - 1"),
        ({"completion_length": 22}, "from 1 to T - 1"),
        ({"attention_mask": torch.ones(3, 21)}, "must be of one shape"),
        ({"temperature": -1.0}, "temperature must be above 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"input_ids": torch.full((3, 22), 2.0)}, "input_ids must be whole numbers"),
        ({"input_ids": torch.full((3, 22), 262)}, "vocabulary has the ids 0 to 261"),
        ({"input_ids": torch.tensor([[300] + [1] * 21])}, "input_ids go from 1 to 300"),
        ({"input_ids": torch.tensor([[1] * 21 + [-100]])}, "-100 belongs into labels"),
        ({"input_ids": torch.zeros(0, 22, dtype=torch.long)}, "no rows"),
        ({"input_ids": torch.zeros(22, dtype=torch.long)}, "from 1 to T - 1"),
    ],
)
def test_impossible_arguments_are_refused(change, match):
    ids, mask = batch()
    given = {"input_ids": ids, "attention_mask": mask, "completion_length": LENGTH} | change
    if "attention_mask" not in change:
        given["attention_mask"] = None
    with pytest.raises(ValueError, match=match):
        completion_logprobs(model_of(), **given)


@pytest.mark.parametrize("factor", [1.5, 1.001])
def test_logits_that_something_unknown_was_done_to_are_refused(factor):
    from cameraready.models import UnknownArchitecture
    from cameraready.models.hooks import hooks_of

    model, (ids, mask) = model_of(), batch()

    class Odd(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * factor
            return output

    model.__class__ = Odd
    with pytest.raises(UnknownArchitecture, match=r"use token_logprobs\(model"):
        completion_logprobs(model, ids, mask, LENGTH)
    assert hooks_of(model) == 0


def test_a_model_that_never_runs_its_head_is_refused():
    from cameraready.models import UnknownArchitecture

    model, (ids, mask) = model_of(), batch()

    class Fused(type(model)):
        def forward(self, input_ids=None, **kwargs):
            hidden = self.model(input_ids=input_ids, attention_mask=kwargs["attention_mask"]).last_hidden_state
            return type("Output", (), {"logits": torch.nn.functional.linear(hidden, self.lm_head.weight)})()

    from cameraready.models import anatomy

    anatomy(model)
    model.__class__ = Fused
    with pytest.raises(UnknownArchitecture, match="never ran its head"):
        completion_logprobs(model, ids, mask, LENGTH)


def test_a_model_that_fails_keeps_no_hooks():
    from cameraready.models.hooks import hooks_of

    model, (ids, mask) = model_of(), batch()
    model.train()
    completion_logprobs(model, ids, mask, LENGTH)
    kept, model.model.norm.weight.data = model.model.norm.weight.data, torch.ones(3)
    with pytest.raises(RuntimeError):
        completion_logprobs(model, ids, mask, LENGTH)
    model.model.norm.weight.data = kept
    assert hooks_of(model) == 0
    assert all(module.training for module in model.modules())


def test_a_model_is_looked_at_once_and_again_when_its_head_is_another(monkeypatch):
    import cameraready.models
    from cameraready.models import anatomy

    looks = []
    monkeypatch.setattr(cameraready.models, "anatomy", lambda model: looks.append(model) or anatomy(model))
    model, (ids, mask) = model_of("granite", tie=False), batch()
    for _ in range(2):
        completion_logprobs(model, ids, mask, LENGTH)
    assert looks == [model]
    model.lm_head = torch.nn.Linear(64, 200, bias=False)
    ids = ids.clamp_max(199)
    found = completion_logprobs(model, ids, mask, LENGTH)
    assert looks == [model, model]
    torch.testing.assert_close(found.logps, plainly(model, ids, mask)[0], rtol=5e-6, atol=5e-6)


def test_a_model_that_was_looked_at_is_let_go():
    import gc
    import weakref

    model, (ids, mask) = model_of(), batch()
    completion_logprobs(model, ids, mask, LENGTH)  # and no backward pass frees its graph
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_looking_at_a_new_model_draws_no_random_numbers():
    peft = pytest.importorskip("peft")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(model_of(), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)).eval()
        model.base_model.model.model.layers[0].train()
        modes = [module.training for module in model.modules()]
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        ids, mask = batch()
        before = torch.get_rng_state()
        first = completion_logprobs(model, ids, mask, LENGTH)
        torch.set_rng_state(before)
        again = completion_logprobs(model, ids, mask, LENGTH)
    assert torch.equal(first.logps, again.logps)
    assert modes == [module.training for module in model.modules()]
