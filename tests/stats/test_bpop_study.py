"""The study's parts: rivals, traces, the simulated clock, its smoke tier, a user's own traces, and the peers."""

import tomllib

import networkx as nx
import numpy as np
import pytest

from cameraready.evidence.context import Context
from cameraready.evidence.peers.environments import open_peer
from cameraready.evidence.specs import Spec
from cameraready.evidence.study import study_folder
from cameraready.stats.bpop import posets
from cameraready.stats.bpop.study import STUDY
from cameraready.stats.bpop.trials import simulation
from cameraready.stats.bpop.trials.measured import f1, scores
from cameraready.stats.bpop.trials.rivals import COUNTING, inferred
from cameraready.stats.bpop.trials.workloads import (
    CLOUD,
    DRAWS,
    cloud_order,
    draw_traces,
    habit,
    latent_order,
    open_workload,
)

N_SHAPED = posets.closure(np.array([[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]], dtype=bool))


# --- rivals and scores ----------------------------------------------------------------------------------------------


def test_the_intersection_of_all_linear_extensions_is_the_order():
    for instance in range(2):
        order = latent_order(instance, {})
        extensions = list(posets.linear_extensions(order))
        found = COUNTING["intersection"](extensions, len(order), 0)
        np.testing.assert_array_equal(found, order)


def test_counting_rules_differ_where_traces_disagree():
    traces = [[0, 1, 2]] * 9 + [[1, 0, 2]]
    found = {name: rule(traces, 3, 0)[0, 1] for name, rule in COUNTING.items()}
    assert found == {"intersection": False, "tolerant": True, "majority": True}
    assert not COUNTING["tolerant"]([*traces, [1, 0, 2]], 3, 0)[0, 1]


def test_scores_by_hand():
    chain = posets.closure(np.diag(np.ones(3, dtype=bool), 1))
    assert scores(chain, chain) == {
        "edge_f1": 1.0, "closure_f1": 1.0, "shd": 0.0, "reversed": 0.0, "missed": 0.0, "extra": 0.0
    }  # fmt: skip
    turned = chain[np.ix_([1, 0, 2, 3], [1, 0, 2, 3])]  # 1, 0, 2, 3: covers 10, 02, 23 against 01, 12, 23
    found = scores(turned, chain)
    assert found["edge_f1"] == pytest.approx(1 / 3)
    assert (found["shd"], found["reversed"], found["missed"], found["extra"]) == (4.0, 1.0, 1.0, 1.0)
    empty = np.zeros((3, 3), dtype=bool)
    assert f1(empty, empty) == 1.0


def test_a_users_arm_may_return_any_acyclic_relation():
    reduced = posets.cover(N_SHAPED)
    np.testing.assert_array_equal(inferred(lambda *a: reduced.astype(int), [], 4, 0).order, N_SHAPED)
    with pytest.raises(ValueError, match=r"shape \(4, 4\)"):
        inferred(lambda *a: np.ones(3), [], 4, 0)
    with pytest.raises(ValueError, match="cycle"):
        inferred(lambda *a: np.ones((4, 4)), [], 4, 0)


# --- workloads ------------------------------------------------------------------------------------------------------


def test_cloud_procedures_are_reduced_orders_of_eight_to_ten_actions():
    for edges in CLOUD.values():
        graph = nx.DiGraph(edges)
        assert set(nx.transitive_reduction(graph).edges) == set(graph.edges)
        assert 8 <= len(graph) <= 10
    for instance in range(6):
        again = cloud_order(instance + 6, {})
        assert nx.is_isomorphic(nx.DiGraph(np.argwhere(again).tolist()), nx.DiGraph(np.argwhere(cloud_order(instance, {})).tolist()))  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
def test_padding_goes_on_until_every_free_pair_was_seen_both_ways(draw):
    order = cloud_order(0, {})
    traces = draw_traces(order, draw=draw, coverage=1.0, noise=0.0, n_traces=5, padded=True, seed=[1])
    assert posets.seen_both_ways(traces, len(order))[posets.incomparable(order)].all()
    if draw in ("kahn", "extensions"):
        assert all(posets.is_linear_extension(trace, order) for trace in traces)


@pytest.mark.parametrize("coverage", [0.0, 0.3, 0.6, 1.0])
def test_habits_leave_the_wanted_share_of_free_pairs(coverage):
    for instance in range(6):
        order = cloud_order(instance, {})
        practised = habit(order, coverage, np.random.default_rng(instance))
        assert (practised | ~order).all()
        left = posets.incomparable(practised).sum() / posets.incomparable(order).sum()
        assert left == pytest.approx(coverage, abs=0.12)


# --- the executor on a simulated clock ------------------------------------------------------------------------------


def test_the_simulated_run_takes_the_critical_path_and_reads_what_it_should():
    costs = simulation.Costs(np.array([1.0, 2.0, 3.0, 4.0]), np.array([10.0, 20.0, 30.0, 40.0]))
    found = simulation.execute(N_SHAPED, N_SHAPED, costs, [0, 1, 2, 3])
    assert found["fell_back"] == 0
    assert found["time_ratio"] == pytest.approx(max(1 + 3, 1 + 4, 2 + 4) / 10)
    # 0 and 1 read the prompt alone, 2 the output of 0 and 3 those of 0 and 1; the serial agent everything before.
    assert found["token_ratio"] == pytest.approx((800 + 10 + 30) / (800 + 10 + 30 + 60))


def test_a_missing_edge_makes_the_run_fall_back_and_an_extra_one_delays_it():
    costs = simulation.Costs(np.ones(4), np.ones(4))
    missing = N_SHAPED.copy()
    missing[1, 3] = False
    found = simulation.execute(missing, N_SHAPED, costs, [0, 1, 2, 3])
    assert found["fell_back"] == 1
    assert found["time_ratio"] == pytest.approx((2 + 1) / 4)  # 0 and 1, then 2; then 3 alone
    chain = np.triu(np.ones((4, 4), dtype=bool), k=1)
    assert simulation.execute(chain, N_SHAPED, costs, [0, 1, 2, 3]) == {
        "fell_back": 0.0, "time_ratio": 1.0, "token_ratio": 1.0
    }  # fmt: skip


# --- the study ------------------------------------------------------------------------------------------------------


def test_card_and_study_name_the_same_arms():
    card = tomllib.loads((study_folder(STUDY) / "card.toml").read_text())
    planned = {c["arm"] for w in STUDY.workloads["desk"] for c in STUDY.plan("desk", w) if "arm" in c}
    assert set(card["arms"]) <= planned | {"numpy"}
    assert card["own_arm"] == STUDY.own_arm


def test_own_traces_are_split_and_every_arm_is_judged_by_what_it_predicts():
    order = cloud_order(0, {})
    generator = np.random.default_rng(0)
    traces = [[f"step {i}" for i in posets.frontier_walk(order, generator)] for _ in range(30)]
    workload = open_workload(Spec("own", "value", "own", value=traces))
    loss = {}
    for arm in ("bpop", "majority", "users"):
        context = Context(seed=0, own={"users": lambda traces, n, seed: np.zeros((n, n))}, is_own_workload=True)
        (row,) = STUDY.trial(workload, context, part="own", instance=0, arm=arm)
        assert 0 <= row["free_share"] <= 1
        loss[arm] = row["loss_per_step"]
    assert loss["bpop"] < loss["users"] < loss["majority"]
    # Without any order a step costs log(remaining) nats.
    assert loss["users"] == pytest.approx(np.log(np.arange(1, len(order) + 1)).mean())
    with pytest.raises(ValueError, match="at least 4"):
        open_workload(Spec("own", "value", "own", value=traces[:2]))


@pytest.mark.peers
def test_pm4pys_miners_find_a_diamond():
    diamond = posets.closure(np.array([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=bool))
    traces = [[0, 1, 2, 3], [0, 2, 1, 3]] * 5
    with open_peer(STUDY.peer("pm4py"), study_folder(STUDY)) as peer:
        for name in ("inductive", "inductive-noise", "heuristics", "powl"):
            found = posets.greedy_order(np.asarray(peer.mine(name, traces, 4)), 0.0)
            np.testing.assert_array_equal(found, diamond, err_msg=name)


@pytest.mark.peers
def test_wfcommons_recipes_give_acyclic_workflows_that_are_the_same_each_time():
    peer_of = STUDY.peer("wfcommons")
    with open_peer(peer_of, study_folder(STUDY)) as peer:
        found, again = (peer.workflows("SrasearchRecipe", [24, 30], 0) for _ in range(2))
    np.testing.assert_array_equal(found["relations"], again["relations"])
    for relation, size in zip(found["relations"], found["sizes"], strict=True):
        order = posets.closure(relation[:size, :size])
        assert 20 <= size <= 30
        assert order.any()
        assert not relation[size:].any()
