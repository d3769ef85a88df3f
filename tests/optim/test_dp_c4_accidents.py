"""Runs that break off, are resumed, copied or fed from elsewhere: the log never says less than what was released."""

import copy
import json

import pytest
import torch
from torch.utils.data import DataLoader

from cameraready.optim.dp_c4 import BudgetSpentError
from cameraready.optim.dp_c4.accounting import PrivacyLedger, epsilon_from_log
from tests.optim.test_dp_c4_engine import closure, private, run, table

pytestmark = pytest.mark.torch
OFF = {"mode": "off"}


def first_batch(made):
    return next(iter(made.loader))[0]


def state(made):
    return copy.deepcopy((made.optimizer.state_dict(), made.loader.state_dict()))


@pytest.mark.parametrize("loader_first", [True, False])
def test_a_lost_step_is_repeated_on_another_sample(loader_first, tmp_path):
    """Two releases on one Poisson sample cost more than two on samples drawn apart, which is what the log counts."""
    options = {**OFF, "audit_file": tmp_path / "audit.jsonl"}
    made = private(**options)
    run(made, steps=1)
    kept, where = state(made)
    lost = private(**OFF)
    lost.optimizer.load_state_dict(kept)
    lost.loader.load_state_dict(where)
    same = first_batch(lost)  # what an exact resumption draws next
    run(made, steps=2)
    again = private(**options)
    loads = [lambda: again.loader.load_state_dict(where), lambda: again.optimizer.load_state_dict(kept)]
    for load in loads if loader_first else loads[::-1]:
        load()
    assert not torch.equal(first_batch(again), same)
    assert len(again.optimizer.ledger.releases) == 2


def test_a_run_resumed_without_the_state_of_its_loader_does_not_draw_its_first_samples_again():
    made = private(**OFF)
    drawn = first_batch(private(**OFF))
    run(made, steps=2)
    again = private(**OFF)
    again.optimizer.load_state_dict(made.optimizer.state_dict())
    assert not torch.equal(first_batch(again), drawn)


def test_a_run_begun_again_over_a_file_with_releases_uses_neither_noise_nor_samples_again(tmp_path):
    options = {**OFF, "audit_file": tmp_path / "audit.jsonl", "participation": "full"}
    made, other = private(**options), None
    run(made, steps=1)
    other = private(**options)
    run(other, steps=2)
    left, right = (next(m.module.parameters()).grad for m in (made, other))
    assert not torch.equal(left, right)
    assert len(other.optimizer.ledger.releases) == 2


def test_a_state_of_other_noise_is_held_to_the_budget():
    options = {"mode": "off", "participation": "full", "steps": 8}
    loud = private(noise_multiplier=0.5, **options)
    run(loud, steps=2)
    made = private(noise_multiplier=None, target_epsilon=2.0, **options)
    made.optimizer.load_state_dict(loud.optimizer.state_dict())
    with pytest.raises(BudgetSpentError):
        run(made)


def test_releases_of_two_runs_are_both_counted():
    one, other = private(**OFF, noise_multiplier=1.0), private(**OFF, noise_multiplier=1.0)
    run(one, steps=3)
    run(other, steps=3)
    other.optimizer.load_state_dict(one.optimizer.state_dict())
    assert len(other.optimizer.ledger.releases) == 6
    assert epsilon_from_log(other.optimizer.audit_log(), 1e-3) > one.optimizer.get_epsilon(1e-3)


def test_a_step_without_the_private_loader_is_refused():
    made = private(**OFF)
    x, y = next(iter(DataLoader(table(), batch_size=15)))
    with pytest.raises(RuntimeError, match="private loader"):
        made.optimizer.step(closure(made, x, y))
    made.optimizer.load_state_dict(made.optimizer.state_dict())
    with pytest.raises(RuntimeError, match="private loader"):
        made.optimizer.step(closure(made, x, y))
    assert made.optimizer.ledger.releases == []


def test_no_state_is_stored_between_the_batches_of_a_step():
    made = private(mode="table", physical_batch_size=20)
    batches = iter(made.loader)
    x, y = next(batches)
    made.optimizer.step(closure(made, x, y))
    with pytest.raises(RuntimeError, match="last physical batch"):
        made.optimizer.state_dict()
    for x, y in batches:
        made.optimizer.step(closure(made, x, y))
    assert made.optimizer.state_dict()["c4"]["step"] == 1


def test_a_last_line_that_lacks_only_its_end_counts_and_a_broken_one_does_not(tmp_path):
    path = tmp_path / "audit.jsonl"
    made = private(**OFF, audit_file=path)
    run(made, steps=3)
    text = path.read_text()
    path.write_text(text.rstrip("\n"))
    assert len(PrivacyLedger(path).releases) == 3
    assert path.read_text() == text
    path.write_text(text[:-10])
    with pytest.warns(UserWarning, match="broken off"):
        assert len(PrivacyLedger(path).releases) == 2
    assert len(path.read_text().splitlines()) == 2


def test_a_version_that_is_no_number_is_refused():
    made = private(**OFF)
    run(made, steps=1)
    log = {**made.optimizer.audit_log(), "version": True}
    with pytest.raises(ValueError, match="expected a log"):
        epsilon_from_log(json.dumps(log), 1e-3)
