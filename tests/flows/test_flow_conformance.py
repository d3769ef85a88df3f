"""What every method of the room keeps to: any convention of a model, dtypes, grids, batches, and no randomness but the one that was given."""

import importlib
from pathlib import Path

import pytest
import torch

from cameraready.flows._samplers import grid
from tests.flows.flow_cases import DIM, SAMPLERS, exact, writings

pytestmark = pytest.mark.torch

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("*_cases.py") if path.stem != "flow_cases")
CASES = [pytest.param(case, id=f"samplers-{case.name}") for case in SAMPLERS] + [
    pytest.param(case, id=f"{name.removesuffix('_cases')}-{case.name}")
    for name in MODULES
    for case in importlib.import_module(f"tests.flows.{name}").CASES
]
every_case = pytest.mark.parametrize("case", CASES)


def noise(n=4, dtype=torch.float64):
    return torch.randn(n, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def result(case, velocity=None, *, x=None, times=None, seed=0, dtype=torch.float64):
    x = noise(dtype=dtype) if x is None else x
    run = case.make(exact() if velocity is None else velocity, x.dtype)
    return run(x, grid(5) if times is None else times, torch.Generator().manual_seed(seed))


@every_case
def test_a_model_written_otherwise_gives_the_same(case):
    expected = result(case)
    for name, velocity in writings().items():
        found = result(case, velocity)
        worst = float((found - expected).abs().max())
        assert worst <= case.tolerance, f"{name}: {worst}"


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_and_dtype_are_kept(case, dtype):
    if dtype == torch.bfloat16 and not case.half:
        pytest.skip("takes no states of half precision")
    asked = []
    v = exact()

    def velocity(x, t, y=None):
        asked.append(x.dtype)
        return v(x, t)

    found = result(case, velocity, dtype=dtype)
    assert found.shape == (4, DIM)
    assert found.dtype == dtype
    assert set(asked) == {dtype}
    if case.independent and not case.trains:  # other draws are made in another precision
        torch.testing.assert_close(found.double(), result(case), rtol=0, atol=0.15 if dtype == torch.bfloat16 else 1e-3)


@every_case
def test_a_velocity_that_is_not_a_number_is_told(case):
    v = exact()

    def broken(x, t, y=None):
        late = torch.as_tensor(t).max() > 0.3
        return v(x, t) * (float("nan") if late else 1.0)

    with pytest.raises((FloatingPointError, ValueError), match=r"(?i)finite|nan"):
        result(case, broken)


@every_case
def test_the_generator_decides_and_no_other_is_drawn_from(case):
    before = torch.get_rng_state()
    first = result(case, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(11)
    assert torch.equal(result(case, seed=5), first)
    torch.set_rng_state(before)


@every_case
def test_a_batch_of_one_and_the_rest_of_the_batch(case):
    one = result(case, x=noise()[:1])
    assert one.shape == (1, DIM)
    if case.independent:
        whole, alone = result(case), torch.cat([result(case, x=noise()[i : i + 1]) for i in range(4)])
        torch.testing.assert_close(whole, alone, rtol=0, atol=1e-6)


@every_case
def test_what_was_given_is_left_as_it_was(case):
    x, times = noise(), grid(5)
    kept = x.clone()
    result(case, x=x, times=times)
    assert torch.equal(x, kept)
    assert torch.equal(times, grid(5))


@every_case
@pytest.mark.parametrize("times", [(0.0, 1.0), (0.0, 0.7, 1.0), (0.0, 0.01, 0.5, 0.52, 1.0)], ids=str)
def test_odd_grids(case, times):
    if not case.takes_times:
        pytest.skip("has no grid of times")
    found = result(case, times=torch.tensor(times, dtype=torch.float64))
    assert found.shape == (4, DIM)
    assert torch.isfinite(found).all()


@every_case
@pytest.mark.parametrize("times", [(0.0, 0.6, 0.4, 1.0), (0.0, 0.5, 0.5, 1.0), (0.0, 500.0, 1000.0), (0.0,)], ids=str)
def test_grids_that_are_none_are_refused(case, times):
    if not case.takes_times:
        pytest.skip("has no grid of times")
    with pytest.raises(ValueError):
        result(case, times=torch.tensor(times, dtype=torch.float64))
