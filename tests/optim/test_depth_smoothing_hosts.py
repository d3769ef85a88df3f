"""In the places where people train: loss scaling, schedulers, copies, torch.compile, accelerate and the Trainer of transformers."""

import copy
import pickle

import pytest
import torch
from torch import nn

from cameraready.optim.depth_smoothing import DepthSmoothing
from tests.optim.optimizer_cases import Regressor

pytestmark = pytest.mark.torch


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(12, 4, dtype=dtype)
    return Regressor(dtype), x, torch.sin(x.sum(dim=1))


def smoothed(model, lr=0.05, **options):
    return DepthSmoothing(torch.optim.AdamW(model.parameters(), lr=lr), model.blocks, alpha=0.3, **options)


def train(model, optimizer, x, y, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_loss_scaling_by_powers_of_two_changes_nothing_and_overflow_skips_the_step():
    model, x, y = problem()
    expected = train(model, smoothed(model), x, y)
    model, x, y = problem()
    optimizer = smoothed(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(((model(x) - y) ** 2).mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert same(model.parameters(), expected)
    optimizer.zero_grad()
    scaler.scale(((model(x) - y) ** 2).mean() * float("inf")).backward()
    scaler.step(optimizer)
    assert same(model.parameters(), expected)
    assert optimizer.steps_taken == 3


def test_a_fused_base_is_scaled_once():
    """A fused AdamW unscales by itself when GradScaler asks it to; behind the wrapper the scaler must do it."""
    results = []
    for scale in (None, 2.0**10):
        model, x, y = problem()
        optimizer = DepthSmoothing(torch.optim.SGD(model.parameters(), lr=0.05, fused=True), model.blocks)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(((model(x) - y) ** 2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([p.detach().clone() for p in model.parameters()])
    assert same(*results)


def test_schedulers_reach_the_base_and_copies_and_pickles_leave_the_schedulers_wrapper_behind():
    model, x, y = problem()
    optimizer = smoothed(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    train(model, optimizer, x, y, 1)
    schedule.step()
    assert optimizer.base_optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]
    other, twin = copy.deepcopy((model, optimizer))
    assert twin.param_groups[0]["params"][0] is next(other.parameters())
    stored, thawed = pickle.loads(pickle.dumps((model, optimizer)))
    expected = train(model, optimizer, x, y)
    assert same(train(other, twin, x, y), expected)
    assert same(train(stored, thawed, x, y), expected)


def test_hooks_run_once_a_step():
    model, x, y = problem()
    optimizer, calls = smoothed(model), []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    train(model, optimizer, x, y, 2)
    assert calls == ["before", "after"] * 2


def test_a_compiled_model_and_a_training_step_under_compile_give_the_same_numbers():
    model, x, y = problem()
    expected = train(model, smoothed(model), x, y)
    model, x, y = problem()
    optimizer = smoothed(model)
    compiled = torch.compile(model, backend="eager")

    @torch.compile(backend="eager")
    def step():
        optimizer.zero_grad()
        ((compiled(x) - y) ** 2).mean().backward()
        optimizer.step()

    for _ in range(3):
        step()
    for a, b in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-7)


def test_autocast_keeps_parameters_and_updates_in_float32():
    model, x, y = problem()
    optimizer = smoothed(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_accelerate_accumulates_gradients_and_saves_and_restores_the_state(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, x, y = problem()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    inner = smoothed(model)
    prepared, optimizer = accelerator.prepare(model, inner)

    def run(batches):
        for batch in range(batches):
            with accelerator.accumulate(prepared):
                accelerator.backward(((prepared(x[batch % 2 :: 2]) - y[batch % 2 :: 2]) ** 2).mean())
                optimizer.step()
                optimizer.zero_grad()

    run(4)
    assert inner.steps_taken == 2
    accelerator.save_state(str(tmp_path))
    run(4)
    expected = [p.detach().clone() for p in model.parameters()]
    accelerator.load_state(str(tmp_path))
    assert inner.steps_taken == 2
    run(4)
    assert same(model.parameters(), expected)


def test_the_trainer_of_transformers_takes_it_and_resumes_from_its_checkpoint(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_embd=8, n_head=2, n_positions=8, vocab_size=11, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    rows = [{"input_ids": (torch.arange(8) * k) % 11, "labels": (torch.arange(8) * k) % 11} for k in range(8)]

    def run(steps, resume=None, alpha=0.3):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        optimizer = DepthSmoothing(torch.optim.AdamW(model.parameters(), lr=0.01), model, alpha=alpha)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"), max_steps=steps, per_device_train_batch_size=2, save_steps=2, use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant",
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train(resume_from_checkpoint=resume)
        return model, optimizer

    plain, _ = run(4, alpha=0.0)
    model, optimizer = run(4)  # over the plain run's checkpoints
    assert optimizer.steps_taken == 4
    assert not torch.equal(model.transformer.h[1].mlp.c_fc.weight, plain.transformer.h[1].mlp.c_fc.weight)
    resumed, optimizer = run(4, resume=str(tmp_path / "out" / "checkpoint-2"), alpha=0.1)
    assert (optimizer.steps_taken, optimizer.alpha) == (4, 0.3)
    assert same(resumed.parameters(), model.parameters())


def test_two_wrappers_share_a_model_between_muon_and_adamw():
    model, x, y = problem()
    matrices = [block.weight for block in model.blocks]
    rest = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = DepthSmoothing(torch.optim.Muon(matrices, lr=0.02), model.blocks, normalize="none")
    adamw = DepthSmoothing(torch.optim.AdamW(rest, lr=0.01), model.blocks, normalize="none")
    other = copy.deepcopy(model)
    ((model(x) - y) ** 2).mean().backward()
    before = [p.detach().clone() for p in model.parameters()]
    muon.step()
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
    assert moved == [name.startswith("blocks") and name.endswith("weight") for name, _ in model.named_parameters()]
    adamw.step()
    ((other(x) - y) ** 2).mean().backward()
    torch.optim.Muon([block.weight for block in other.blocks], lr=0.02).step()
    total = sum(block.weight.detach() for block in model.blocks) - sum(block.weight.detach() for block in other.blocks)
    assert total.abs().max() < 1e-5  # the sum over depth is the plain one


def test_gradient_checkpointing_and_a_second_backward_see_the_real_tensors():
    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = DepthSmoothing(torch.optim.SGD(blocks.parameters(), lr=0.1), blocks)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    for block in blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    loss = x.pow(2).mean()
    loss.backward(retain_graph=True)
    pointers = [p.data_ptr() for p in blocks.parameters()]
    optimizer.step()
    assert [p.data_ptr() for p in blocks.parameters()] == pointers
