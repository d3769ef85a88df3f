"""The likelihood of traces: closed forms, normalisation, and three implementations that must agree."""

import itertools
import math

import numpy as np
import pytest

from cameraready.stats.bpop import LatentPrior, posets
from cameraready.stats.bpop.inference.bitsets import bit_set, encode, packed, unpacked
from cameraready.stats.bpop.inference.exact import log_likelihood_of_orders
from cameraready.stats.bpop.inference.likelihood import log_likelihood, step_weights
from cameraready.stats.bpop.inference.numpy_sampler import trace_log_likelihood
from cameraready.stats.bpop.inference.sampler import order_log_likelihood


def compiled(traces, order, beta, eps, choice_sets=None):
    return order_log_likelihood(encode(traces, len(order), choice_sets), packed(order), packed(order.T), beta, eps)


def random_order(n, seed, dimension=2):
    return LatentPrior(dimension=dimension).draw(n, 1, np.random.default_rng(seed))[0]


def test_bit_sets_hold_what_was_put_in():
    relation = np.random.default_rng(0).random((3, 130)) < 0.3
    np.testing.assert_array_equal(unpacked(packed(relation), 130), relation)
    np.testing.assert_array_equal(bit_set(np.flatnonzero(relation[0]).tolist(), 130), packed(relation)[0])


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("beta", [0.0, 1.7])
def test_without_dependencies_every_trace_has_probability_one_over_n_factorial(n, beta):
    trace = np.random.default_rng(0).permutation(n).tolist()
    free = np.zeros((n, n), dtype=bool)
    assert compiled([trace], free, beta, 0.1) == pytest.approx(-math.lgamma(n + 1), abs=1e-12)


def test_a_total_order_leaves_no_choice_but_error():
    n, eps = 6, 0.1
    order = np.triu(np.ones((n, n), dtype=bool), k=1)
    expected = sum(math.log(1 - eps + eps / left) for left in range(n, 0, -1))
    assert compiled([list(range(n))], order, 1.0, eps) == pytest.approx(expected, abs=1e-12)
    assert compiled([list(range(n))], order, 1.0, 0.0) == 0.0
    assert compiled([list(range(n))[::-1]], order, 1.0, 0.0) == -math.inf


def test_three_actions_by_hand():
    """0 before 2, 1 free. Trace 1, 0, 2: 1 has weight 1 against 2^beta, then only 0 is ready, then 2."""
    order = np.zeros((3, 3), dtype=bool)
    order[0, 2] = True
    beta, eps = 1.5, 0.06
    expected = math.log(eps / 3 + (1 - eps) / (1 + 2**beta)) + math.log(eps / 2 + (1 - eps)) + math.log(eps + (1 - eps))
    assert compiled([[1, 0, 2]], order, beta, eps) == pytest.approx(expected, abs=1e-12)
    # Trace 2, 1, 0: 2 comes too early, after which 0 has no successor left and the two are alike.
    expected = math.log(eps / 3) + math.log(0.5)
    assert compiled([[2, 1, 0]], order, beta, eps) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("beta", "eps"), [(0.0, 0.0), (1.0, 0.05), (3.0, 0.5)])
def test_probabilities_of_all_traces_add_up_to_one(seed, beta, eps):
    order = random_order(5, seed)
    total = sum(math.exp(compiled([list(trace)], order, beta, eps)) for trace in itertools.permutations(range(5)))
    assert total == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("n", "beta"), [(6, 0.8), (12, 2.5), (30, 50.0), (70, 1.3), (130, 0.0)])
def test_three_implementations_agree(n, beta):
    """Also with more than 64 actions, with weights that cancel (30^50), and with errors in the traces."""
    order, generator = random_order(n, n), np.random.default_rng(n)
    traces = [posets.frontier_walk(order, generator, beta=1.0, eps=0.2) for _ in range(3)]
    traces += [traces[0]]
    expected = sum(trace_log_likelihood(trace, trace, order, beta, 0.1) for trace in traces)
    assert compiled(traces, order, beta, 0.1) == pytest.approx(expected, rel=1e-9)
    vectorised = sum(log_likelihood_of_orders(t, order[None], np.array([beta]), 0.1)[0, 0] for t in traces)
    assert vectorised == pytest.approx(expected, rel=1e-9)


def test_a_trace_that_covers_some_actions_speaks_of_those_alone():
    order, generator = random_order(9, 3), np.random.default_rng(0)
    part = generator.permutation(9)[:5].tolist()
    among = order[np.ix_(part, part)]
    assert compiled([part], order, 1.2, 0.1) == pytest.approx(compiled([list(range(5))], among, 1.2, 0.1))


def test_a_trace_that_broke_off_is_the_sum_of_its_continuations():
    order = random_order(6, 5)
    begun, rest = [0, 3], [1, 2, 4, 5]
    whole = sum(math.exp(compiled([begun + list(end)], order, 1.0, 0.1)) for end in itertools.permutations(rest))
    assert math.exp(compiled([begun], order, 1.0, 0.1, [range(6)])) == pytest.approx(whole, rel=1e-10)


def test_equal_traces_are_stored_once_and_counted():
    encoded = encode([[0, 1], [1, 0], [0, 1], [0]], 2)
    assert encoded.count.tolist() == [1.0, 2.0, 1.0]
    assert encoded.start.tolist() == [0, 1, 3, 5]


def test_the_floor_only_cuts_off_what_is_below_it():
    order, generator = random_order(8, 1), np.random.default_rng(0)
    traces = encode([posets.frontier_walk(order, generator, eps=0.1) for _ in range(10)], 8)
    weight, out = np.empty(9), np.empty(len(traces.count))
    step_weights(1.0, weight)

    def value(floor):
        parts = traces.steps, traces.start, traces.choice, traces.count, packed(order), packed(order.T)
        return log_likelihood(*parts, weight, 0.05, floor, out)

    whole = value(-np.inf)
    assert value(whole - 1e-9) == whole
    assert value(whole) == -np.inf
    assert value(whole + 1) == -np.inf
    assert (traces.count * out).sum() < 0
