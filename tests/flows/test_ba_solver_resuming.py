"""A SideNet's training broken off and taken up again, and its files."""

import pytest
import torch

from cameraready.flows import CosinePath
from cameraready.flows.ba_solver import MLPSideNet, train_sidenet
from tests.flows.test_ba_solver_training import seeded, turning

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("own", [False, True])
def test_a_training_that_was_broken_off_goes_on_to_the_same_bits(own, tmp_path):
    source = (
        {"shape": (2,), "own_samples": 16, "own_steps": 2} if own else {"data": torch.randn(50, 2, generator=seeded(0))}
    )

    def run(steps, checkpoint=None, **more):
        side = MLPSideNet(2, width=16, depth=1, generator=seeded(1))
        return train_sidenet(
            turning, side, steps=steps, batch=8, chain=2, generator=seeded(2), checkpoint=checkpoint, **source, **more
        )

    def interrupt(done, steps, loss):
        if done == 5:
            raise KeyboardInterrupt

    whole = run(12)
    first = run(12, tmp_path / "side.safetensors", progress=interrupt)
    again = run(12, tmp_path / "side.safetensors")
    assert again.losses == whole.losses
    assert again.losses[:5] == first.losses
    assert len(first.losses) == 5
    assert again.calls == whole.calls + (4 if own else 0), "own samples are drawn again"
    for name, value in whole.side.state_dict().items():
        assert torch.equal(again.side.state_dict()[name], value)
    with pytest.raises(ValueError, match="chain=2, this training has chain=3"):
        train_sidenet(
            turning,
            MLPSideNet(2, width=16, depth=1),
            steps=12,
            batch=8,
            chain=3,
            checkpoint=tmp_path / "side.safetensors",
            **source,
        )
    with pytest.raises(ValueError, match="another size"):
        train_sidenet(
            turning,
            MLPSideNet(2, width=8, depth=1),
            steps=12,
            batch=8,
            chain=2,
            checkpoint=tmp_path / "side.safetensors",
            **source,
        )


def test_ctrl_c_and_the_time_limit_lose_nothing(tmp_path):
    data, file = torch.randn(50, 2, generator=seeded(0)), tmp_path / "side.safetensors"

    def interrupt(done, steps, loss):
        if done == 3:
            raise KeyboardInterrupt

    def run(**more):
        side = MLPSideNet(2, width=16, depth=1, generator=seeded(1))
        return train_sidenet(turning, side, data, batch=8, chain=2, generator=seeded(2), **more)

    stopped = run(steps=10, checkpoint=file, progress=interrupt)
    assert (len(stopped.losses), stopped.finished) == (3, False)
    assert run(steps=10, checkpoint=file).losses == run(steps=10).losses
    short = run(steps=10_000, max_seconds=0.0)
    assert not short.finished
    assert len(short.losses) < 10
    with pytest.raises(KeyboardInterrupt):
        run(steps=10, progress=interrupt)


def test_ctrl_c_within_a_step_loses_that_step_alone_and_goes_on_to_the_same_bits(tmp_path):
    data, file = torch.randn(50, 2, generator=seeded(0)), tmp_path / "side.safetensors"
    asked = []

    def breaking(x, t, y=None):
        asked.append(1)
        if len(asked) == 11:  # in the chain of the fourth step
            raise KeyboardInterrupt
        return turning(x, t)

    def run(velocity, **more):
        side = MLPSideNet(2, width=16, depth=1, generator=seeded(1))
        return train_sidenet(velocity, side, data, steps=8, batch=8, chain=2, generator=seeded(2), **more)

    assert len(run(breaking, checkpoint=file).losses) == 3
    again, whole = run(turning, checkpoint=file), run(turning)
    assert again.losses == whole.losses
    for name, value in whole.side.state_dict().items():
        assert torch.equal(again.side.state_dict()[name], value)


def test_the_time_limit_is_that_of_a_call(tmp_path):
    data, file = torch.randn(50, 2, generator=seeded(0)), tmp_path / "side.safetensors"
    done = []
    for _ in range(2):
        side = MLPSideNet(2, width=8, depth=1)
        run = train_sidenet(turning, side, data, steps=100_000, batch=4, chain=1, max_seconds=0.05, checkpoint=file)
        done.append(len(run.losses))
    assert done[1] > done[0] > 0
    assert not run.finished


def test_a_checkpoint_of_another_training_is_not_taken_over(tmp_path):
    data, file = torch.randn(50, 2, generator=seeded(0)), tmp_path / "side.safetensors"

    def run(data=data, **more):
        return train_sidenet(
            turning, MLPSideNet(2, width=8, depth=1), data, steps=2, batch=4, chain=1, checkpoint=file, **more
        )

    run()
    for more in ({"label_dropout": 0.9}, {"path": CosinePath()}, {"null_label": 3}, {"data": data * 2}, {"lr": 1e-4}):
        with pytest.raises(ValueError, match="remove the file to begin anew"):
            run(**more)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match="damaged"):
        run()


def test_damaged_files_of_a_network_are_told_with_their_name(tmp_path):
    side = MLPSideNet(3, width=8, depth=1)
    side.save_pretrained(tmp_path)
    for text in (
        "[1, 2]",
        '{"kind": "MLPSideNet"}',
        '{"kind": ["a"]}',
        '{"kind": "MLPSideNet", "dim": 3, "colour": 1}',
        "{",
    ):
        (tmp_path / "sidenet.json").write_text(text)
        with pytest.raises(ValueError, match=r"settings of a SideNet|cannot be made of|is no JSON"):
            MLPSideNet.from_pretrained(tmp_path)
    (tmp_path / "sidenet.json").write_text('{"kind": "MLPSideNet", "dim": 4, "width": 8, "depth": 1}')
    with pytest.raises(ValueError, match="is not of a MLPSideNet"):
        MLPSideNet.from_pretrained(tmp_path)
    (tmp_path / "sidenet.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"sidenet\.safetensors is damaged"):
        MLPSideNet.from_pretrained(tmp_path)
