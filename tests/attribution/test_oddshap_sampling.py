"""Properties of the sequence in which coalitions are evaluated."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cameraready.attribution.oddshap.sampling import CoalitionSequence


def sequence(n: int, *, paired: bool = True, seed: int = 0) -> CoalitionSequence:
    return CoalitionSequence(n, paired=paired, generator=np.random.default_rng(seed))


@given(st.integers(1, 9), st.booleans(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_the_whole_sequence_is_every_coalition_once(n: int, paired: bool, seed: int) -> None:
    coalitions = sequence(n, paired=paired, seed=seed).coalitions(0, 2**n)
    assert len(np.unique(coalitions, axis=0)) == 2**n
    assert not coalitions[0].any()
    assert coalitions[1].all()
    with pytest.raises(ValueError, match="there are only"):
        sequence(n, paired=paired, seed=seed).coalitions(0, 2**n + 2)


@pytest.mark.parametrize(("n", "m"), [(12, 3000), (30, 5001), (65, 4000), (130, 3000), (1500, 60)])
@pytest.mark.parametrize("paired", [True, False])
def test_no_coalition_is_drawn_twice_and_pairs_are_complements(n: int, m: int, paired: bool) -> None:
    drawn = sequence(n, paired=paired)
    coalitions, units = drawn.coalitions(0, m), drawn.units(m)
    assert coalitions.shape == (m, n)
    assert len(np.unique(np.packbits(coalitions, axis=1), axis=0)) == m
    assert (coalitions[units.first] == units.coalitions).all()
    if paired:
        assert (coalitions[units.first + 1] == ~units.coalitions).all()
        assert len(units.weights) == (m - 2) // 2  # the one without a complement in an odd budget is left out
    else:
        assert len(units.weights) == m - 2


@given(st.integers(2, 40), st.booleans(), st.lists(st.integers(2, 900), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_the_sequence_does_not_depend_on_how_it_is_extended(n: int, paired: bool, stops: list[int]) -> None:
    stops = sorted({min(stop, 2**n) for stop in stops})
    whole = sequence(n, paired=paired).coalitions(0, stops[-1])
    grown = sequence(n, paired=paired)
    parts = [grown.coalitions(a, b) for a, b in zip([0, *stops[:-1]], stops, strict=True)]
    assert (np.concatenate(parts) == whole).all()


def test_sizes_are_uniform_until_the_small_ones_are_enumerated() -> None:
    sizes = sequence(30).coalitions(2, 5000).sum(axis=1)
    counts = np.bincount(sizes, minlength=30)[1:30]
    assert counts[0] == counts[-1] == 30  # all there are
    assert np.ptp(counts[1:-1]) <= 2


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("n", "m"), [(5, 12), (8, 100), (12, 2000), (30, 5000), (200, 4000)])
def test_weights_add_up_to_the_kernel_and_are_equal_within_a_size(n: int, m: int, paired: bool) -> None:
    units = sequence(n, paired=paired).units(m)
    sizes = units.coalitions.sum(axis=1)
    mass = {s: 1 / (s * (n - s)) for s in range(1, n)}
    for s in np.unique(np.minimum(sizes, n - sizes) if paired else sizes):
        rows = units.strata == s
        expected = mass[s] + (mass[n - s] if paired and n != 2 * s else 0)
        assert units.weights[rows].sum() == pytest.approx(expected)
        assert np.ptp(units.weights[rows]) == 0
        count = comb(n, s) // 2 if paired and n == 2 * s else comb(n, s)
        assert units.sampled_fraction[rows] == pytest.approx(rows.sum() / count, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize("paired", [True, False])
def test_within_a_size_every_coalition_is_equally_likely(paired: bool) -> None:
    # Inclusion counts of the 10 coalitions of size 2 out of 5 over many sequences; binomial, four standard deviations.
    hits = np.zeros(2**5)
    drawn = 0
    for seed in range(600):
        block = sequence(5, paired=paired, seed=seed).coalitions(2, 12)
        block = block[block.sum(axis=1) == 2]
        hits += np.bincount(block @ (1 << np.arange(5)), minlength=32)
        drawn += len(block)
    counts = hits[hits > 0]
    assert len(counts) == 10
    assert np.abs(counts - drawn / 10).max() < 4 * np.sqrt(drawn / 10)


def test_weighted_sums_are_unbiased() -> None:
    # The kernel-weighted sum of an arbitrary function over all interior coalitions, against its mean over sequences.
    n, values = 6, np.random.default_rng(0).normal(size=64)
    kernel = np.array([0] + [1 / (s * (n - s) * comb(n, s)) for s in range(1, n)] + [0])
    sizes = np.array([bin(code).count("1") for code in range(64)])
    truth = kernel[sizes] @ values
    found = []
    for seed in range(800):
        drawn = sequence(n, paired=False, seed=seed)
        units = drawn.units(27)  # five sizes, five rounds
        found.append(units.weights @ values[units.coalitions @ (1 << np.arange(n))])
    assert np.mean(found) == pytest.approx(truth, abs=4 * np.std(found) / np.sqrt(len(found)))


@pytest.mark.parametrize("n", [61, 64, 65, 129, 1100])
def test_weights_are_finite_for_many_players(n: int) -> None:
    weights = sequence(n).units(400).weights
    assert np.isfinite(weights).all()
    assert weights.min() > 0
    assert weights.max() / weights.min() < n  # the binomials cancel; what remains is n^2 / (4 (n - 1)) and the rounds
