"""What is selected, how often, and that a sampler goes on where it stopped."""

import math

import pytest
import torch
from safetensors.torch import load, save
from torch.utils.data import DataLoader

from cameraready.posttraining.paced import PacedSampler, PartitionHead, RunningAccuracy

pytestmark = pytest.mark.torch


class Known:
    """An estimate that is what it is told."""

    def __init__(self, values):
        self.values = torch.as_tensor(values, dtype=torch.float64)
        self.updates = 0

    @property
    def n_prompts(self):
        return len(self.values)

    def accuracy(self, prompt_ids=None, *, clip=True):
        values = self.values.clamp(0, 1) if clip else self.values
        return values if prompt_ids is None else values[prompt_ids]


RAMP = torch.linspace(0, 1, 41)  # prompt 20 is at 0.5


def test_without_exploration_the_nearest_to_the_target_are_taken():
    sampler = PacedSampler(Known(RAMP), 5, explore=0.0)
    assert sorted(sampler.select().tolist()) == [18, 19, 20, 21, 22]
    assert sorted(PacedSampler(Known(RAMP), 3, explore=0.0, target=0.0).select().tolist()) == [0, 1, 2]


def test_no_prompt_is_taken_twice_running_and_none_twice_at_once():
    sampler = PacedSampler(Known(RAMP), 12, explore=0.4, seed=3)
    before = set()
    for _ in range(200):
        chosen = sampler.select().tolist()
        assert len(set(chosen)) == 12
        assert not before & set(chosen)
        before = set(chosen)


def test_the_estimate_is_not_clipped_for_selection():
    # Clipped, all of these would tie at 1.
    sampler = PacedSampler(Known([1.5, 1.4, 1.3, 1.2, 1.6, 1.7]), 2, explore=0.0, target=1.0)
    assert sorted(sampler.select().tolist()) == [2, 3]


def test_ties_are_broken_at_random_evenly():
    counts = torch.zeros(20)
    for seed in range(2000):
        counts[PacedSampler(Known([0.5] * 20), 4, explore=0.0, seed=seed).select()] += 1
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 43.8  # 0.999 quantile with 19 degrees of freedom (counts are less spread than multinomial ones)


def test_exploration_draws_its_share_from_all_the_rest():
    sampler = PacedSampler(Known(RAMP), 8, explore=0.25, seed=1)
    # The greedy part never leaves the 16 nearest (8 may be barred); the rest is exploration, uniform but for those.
    counts, n = torch.zeros(41), 4000
    for _ in range(n):
        counts[sampler.select()] += 1
    far = counts[(RAMP - 0.5).abs() > 0.21]
    assert (counts > 0).all()
    expected = far.mean()
    assert ((far - expected).abs() < 5 * expected.sqrt()).all()
    assert (PacedSampler(Known(RAMP), 8, explore=0.0).select() - 20).abs().max() <= 4


def test_exploring_all_is_uniform_sampling():
    counts, n = torch.zeros(41), 3000
    sampler = PacedSampler(Known(RAMP), 5, explore=1.0)
    for _ in range(n):
        counts[sampler.select()] += 1
    expected = n * 5 / 41
    assert ((counts - expected).abs() < 5 * math.sqrt(expected)).all()


def test_candidates_restrict_the_search():
    sampler = PacedSampler(Known(RAMP), 4, explore=0.0, candidates=10, seed=0)
    distances = torch.stack([(RAMP[sampler.select()] - 0.5).abs().max() for _ in range(50)])
    assert distances.mean() > 0.1  # of all, the four nearest are within 0.05 or, when these are barred, 0.1
    assert distances.mean() < 0.4


def test_an_epoch_repeats_as_trl_wants_it():
    sampler = PacedSampler(Known(RAMP), 3, group=2, repeat=2, batches=4)
    indices = list(sampler)
    assert len(indices) == len(sampler) == 4 * 3 * 2 * 2
    for start in range(0, len(indices), 12):
        block = indices[start : start + 12]
        assert block[:6] == block[6:]
        assert block[0:6:2] == block[1:6:2]
        assert len(set(block)) == 3


def test_a_selection_is_made_when_it_is_asked_for_and_staleness_counts_updates_missed():
    known = Known(RAMP)
    sampler = PacedSampler(known, 5, explore=0.0, batches=3)
    loader = iter(DataLoader(range(41), batch_size=5, sampler=sampler))
    next(loader)
    known.values = known.values.roll(10)  # prompt 30 is at 0.5 now
    known.updates += 1
    assert sampler.staleness() == 1
    assert sorted(next(loader).tolist()) == [28, 29, 30, 31, 32]
    assert sampler.staleness() == 0
    assert sampler.staleness(sampler.state_dict()["history"][0].flip(0)) == 1


@pytest.mark.parametrize("stop", [0, 1, 6, 7, 11, 12, 25])
def test_a_resumed_sampler_goes_on_as_if_nothing_had_happened(stop):
    def fresh():
        return PacedSampler(Known(RAMP), 3, explore=0.5, group=2, batches=5, seed=4)

    whole = fresh()
    expected = list(whole) + list(whole)
    first = fresh()
    iterator = iter(first)
    taken = [next(iterator) for _ in range(stop)]
    state = load(save(first.state_dict()))
    second = fresh()
    second.load_state_dict(state)
    assert taken + list(second) + list(second) == expected
    # A trainer that walks over what was consumed gets the recorded selections again, and then the same new ones.
    third = fresh()
    third.load_state_dict(state, from_start=True)
    assert list(third) + list(third) == expected


def test_a_state_at_the_end_of_an_epoch_begins_the_next():
    sampler = PacedSampler(Known(RAMP), 4, batches=2, seed=1)
    list(sampler)
    state = sampler.state_dict()
    expected = list(sampler)
    again = PacedSampler(Known(RAMP), 4, batches=2, seed=7)
    again.load_state_dict(state)
    assert list(again) == expected


def test_global_randomness_is_neither_used_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = PacedSampler(Known(RAMP), 4, seed=2).select()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(PacedSampler(Known(RAMP), 4, seed=2).select(), first)


@pytest.mark.parametrize("make", [lambda: PartitionHead(torch.randn(20, 3)), lambda: RunningAccuracy(20)])
def test_it_takes_both_estimates(make):
    assert len(set(PacedSampler(make(), 6).select().tolist())) == 6


def test_misuse_is_explained():
    for options, message in (
        ({"batch_size": 21}, "half of the 41"),
        ({"batch_size": 4, "explore": 1.2}, "explore in"),
        ({"batch_size": 4, "candidates": 3}, "candidates must be from"),
        ({"batch_size": 4, "group": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            PacedSampler(Known(RAMP), **options)
    with pytest.raises(ValueError, match="training diverged"):
        PacedSampler(Known([0.1, math.nan, 0.2, 0.3]), 2).select()
    sampler = PacedSampler(Known(RAMP), 4)
    list(sampler)
    with pytest.raises(ValueError, match="selections of"):
        PacedSampler(Known(RAMP), 5).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="larger pool"):
        PacedSampler(Known(RAMP[:9]), 4).load_state_dict(sampler.state_dict())
