"""The four shapes of a study, whole, through worker processes; they are also the documentation's examples."""

import pytest

from cameraready.evidence.checking import check


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAMERAREADY_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def verdicts(study, **options):
    result = check(f"tests.evidence.studies.{study}:STUDY", quiet=True, **options)
    assert not result.failures
    return result, {(v.label, v.workload): v for v in result.claims}


def test_many_cheap_trials():
    result, found = verdicts("estimating")
    assert found["1", "dirty"].verdict == "holds"
    assert found["1", "dirty"].high < 1 / 3
    assert found["2", "clean"].verdict == "holds"
    assert found["3", ""].verdict == "untested"
    assert found["1", "dirty"].blocks == 40
    assert result.rows.height == 2 * 40 * 2 * 3


def test_interleaved_timing():
    result, found = verdicts("sorting")
    assert found["1", "int16"].verdict == "holds"  # tenfold, not a matter of the machine's mood
    assert found["2", "int16"].verdict == "holds"
    assert result.rows.filter(result.rows["sort"] == "radix").height == 10 * 3
    assert (result.rows["trial_peak_mb"] > 0).all()


def test_curves_over_steps():
    result, found = verdicts("training")
    assert found["1", "all"].verdict == "holds"
    assert found["2", "kappa-100"].high < -0.5
    assert result.rows.height == 2 * 12 * 2 * 60


def test_a_census_that_must_have_no_violation():
    _, found = verdicts("census")
    assert found["1", "all"].verdict == "holds"
    assert found["2", "20-bit"].verdict == "holds"
    assert found["2", "90-bit"].verdict == "fails"
    assert found["1", "all"].low is None


def test_a_users_method_is_judged_as_the_best_peer():
    """With a perfect estimator among the peers, nothing can be better than the best peer."""
    result, _ = verdicts("estimating", with_={"zero": lambda sample: 0.0 + 1e-9}, set={"size": 50}, claims=None)
    assert "zero" in result.answer
    assert "keep" in result.answer
