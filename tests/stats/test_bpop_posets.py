"""Partial orders: closure and reduction against networkx, extensions against enumeration."""

import math
from collections import Counter

import networkx as nx
import numpy as np
import pytest
from scipy.stats import chisquare

from cameraready.stats.bpop import LatentPrior, posets
from cameraready.stats.bpop.inference.exact import all_orders, prior_of_orders

N_SHAPED = posets.closure(np.array([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=bool))


def random_orders(n, count, seed=0):
    return LatentPrior(dimension=2).draw(n, count, np.random.default_rng(seed))


def graph(relation):
    found = nx.DiGraph()
    found.add_nodes_from(range(len(relation)))
    found.add_edges_from(map(tuple, np.argwhere(relation)))
    return found


def test_closure_and_cover_are_networkx():
    for order in random_orders(9, 20):
        reduced = posets.cover(order)
        assert set(graph(reduced).edges) == set(nx.transitive_reduction(graph(order)).edges)
        np.testing.assert_array_equal(posets.closure(reduced), order)


def test_a_cycle_has_no_closure():
    with pytest.raises(ValueError, match="cycle"):
        posets.closure(np.array([[0, 1, 0], [0, 0, 1], [1, 0, 0]], dtype=bool))
    with pytest.raises(ValueError, match="square"):
        posets.closure(np.ones((2, 3), dtype=bool))


def test_the_greedy_order_keeps_what_is_consistent_and_leaves_out_the_weakest_of_a_cycle():
    for order in random_orders(8, 10, seed=1):
        np.testing.assert_array_equal(posets.greedy_order(0.9 * order, 1 / 3), order)
    weight = np.array([[0, 0.9, 0.0], [0, 0, 0.8], [0.5, 0, 0]])
    np.testing.assert_array_equal(np.argwhere(posets.greedy_order(weight, 1 / 3)), [[0, 1], [0, 2], [1, 2]])
    noisy = np.random.default_rng(0).random((12, 12))
    posets.closure(posets.greedy_order(noisy, 0.4))  # raises for a cycle


def test_a_realizer_has_nothing_in_common_but_the_order():
    generator = np.random.default_rng(0)
    for order in [*random_orders(9, 15, seed=3), np.zeros((9, 9), dtype=bool), N_SHAPED]:
        extensions = posets.realizer(order, 12, generator)
        assert all(posets.is_linear_extension(trace, order) for trace in extensions)
        position = np.argsort(extensions, axis=1)
        np.testing.assert_array_equal((position[:, :, None] < position[:, None, :]).all(axis=0), order)
        assert len(posets.realizer(order, 1, generator)) == 1
    total = np.triu(np.ones((5, 5), dtype=bool), k=1)
    assert posets.realizer(total, 12, generator) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("draw", [posets.frontier_walk, posets.uniform_extension])
def test_without_noise_every_trace_is_a_linear_extension(draw):
    generator = np.random.default_rng(0)
    for order in random_orders(10, 10, seed=2):
        trace = draw(order, generator)
        assert sorted(trace) == list(range(10))
        assert posets.is_linear_extension(trace, order)


def test_uniform_extensions_are_uniform_and_kahns_are_not():
    """The N-shaped order has 5 linear extensions; Kahn's algorithm takes them with 1/4, 1/8, 1/8, 1/4, 1/4."""
    extensions = [tuple(trace) for trace in posets.linear_extensions(N_SHAPED)]
    assert len(extensions) == 5
    assert all(posets.is_linear_extension(trace, N_SHAPED) for trace in extensions)
    generator = np.random.default_rng(0)
    uniform = Counter(tuple(posets.uniform_extension(N_SHAPED, generator)) for _ in range(2_000))
    assert chisquare([uniform[e] for e in extensions]).pvalue > 0.001
    kahn = Counter(tuple(posets.frontier_walk(N_SHAPED, generator)) for _ in range(2_000))
    assert chisquare([kahn[e] for e in extensions]).pvalue < 1e-6


def test_the_walk_prefers_actions_with_more_successors():
    """First step: action 0 has two successors, action 1 one, so that 0 is taken with 3^2 / (3^2 + 2^2)."""
    generator = np.random.default_rng(0)
    first = np.mean([posets.frontier_walk(N_SHAPED, generator, beta=2.0)[0] == 0 for _ in range(3_000)])
    assert first == pytest.approx(9 / 13, abs=4 * math.sqrt(0.25 / 3_000))


def test_pairs_seen_both_ways():
    traces = [[0, 1, 2], [0, 2, 1]]
    assert np.argwhere(posets.seen_both_ways(traces, 3)).tolist() == [[1, 2], [2, 1]]
    assert posets.precedence_counts(traces, 3)[0].tolist() == [0, 2, 2]


def test_there_are_as_many_orders_as_the_encyclopedia_says():
    assert [len(all_orders(n)) for n in range(1, 6)] == [1, 3, 19, 219, 4231]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_one_dimension_gives_total_orders_all_alike(n):
    probability = prior_of_orders(LatentPrior(dimension=1), n, 200, np.random.default_rng(0))
    total = all_orders(n).sum(axis=(1, 2)) == n * (n - 1) // 2
    assert total.sum() == math.factorial(n)
    np.testing.assert_allclose(probability[total], 1 / math.factorial(n), rtol=1e-12)
    assert probability.sum() == pytest.approx(1)


def test_two_dimensions_relate_two_actions_as_the_orthant_probability_says():
    """P(i before j) = 1/4 + E asin(rho) / (2 pi) = 1/2 - 1 / (2 pi) for uniform rho."""
    orders = LatentPrior(dimension=2).draw(2, 40_000, np.random.default_rng(0))
    expected = 0.5 - 1 / (2 * math.pi)
    assert orders[:, 0, 1].mean() == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 40_000))


@pytest.mark.parametrize(
    "bad", [{"dimension": 0}, {"max_dimension": 65}, {"dimension_rate": 0.0}, {"rho_shape": float("nan")}]
)
def test_a_prior_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        LatentPrior(**bad)
