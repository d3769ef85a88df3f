"""The regressor for tables of series: tables and pairs, units, dates, interruption, errors."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from cameraready.stats.sfconvcnp import AliasingWarning, NeuralProcessRegressor
from cameraready.stats.sfconvcnp.tasks import read_inputs

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_torch_thread")]

SMALL = {"width": 8, "n_blocks": 1, "groups": 4, "max_freq": 2.0, "n_steps": 5, "batch_size": 4, "random_state": 0}


def waves(n_series=12, n=20, seed=0, scale=1.0, offset=0.0):
    draw = np.random.default_rng(seed)
    tasks = []
    for _ in range(n_series):
        x = np.sort(draw.uniform(0, 6, size=n + draw.integers(0, 5)))
        tasks.append((x * scale + offset, np.sin(x + draw.uniform(0, 6))))
    return tasks


@pytest.fixture(scope="module")
def learned():
    return NeuralProcessRegressor(**{**SMALL, "width": 16, "n_blocks": 2, "n_steps": 200, "learning_rate": 4e-3}).fit(
        waves(48)
    )


def test_it_completes_new_series_better_than_their_mean(learned):
    errors, spreads = [], []
    for x, y in waves(10, seed=9):
        mean, std = learned.predict((x[::3], y[::3]), x[1::3], return_std=True)
        errors.append(np.mean((mean - y[1::3]) ** 2) / np.var(y))
        spreads.append(np.mean(((mean - y[1::3]) / std) ** 2))
    assert np.mean(errors) < 0.25
    assert 0.2 < np.mean(spreads) < 5
    x, y = waves(1, seed=8)[0]
    drawn = learned.sample((x[::2], y[::2]), x[1::2], n_samples=200, random_state=0)
    assert drawn.shape == (200, len(x[1::2]))
    assert np.mean((drawn.mean(0) - y[1::2]) ** 2) < 0.3 * np.var(y)


def test_a_table_equals_its_series_and_units_do_not_matter():
    tasks = waves()
    table = pd.DataFrame(
        {
            "id": np.concatenate([[f"s{i}"] * len(x) for i, (x, _) in enumerate(tasks)]),
            "t": np.concatenate([x for x, _ in tasks]),
            "v": np.concatenate([y for _, y in tasks]),
        }
    )
    x, y = waves(1, seed=3)[0]
    expected = NeuralProcessRegressor(**SMALL).fit(tasks).predict((x[:5], y[:5]), x)
    by_table = NeuralProcessRegressor(**SMALL, columns=("id", ["t"], ["v"])).fit(table)
    np.testing.assert_array_equal(by_table.predict((x[:5], y[:5]), x), expected)
    scaled = [(1000 * x + 1.7e9, 50 * y - 3) for x, y in tasks]
    far = NeuralProcessRegressor(**SMALL).fit(scaled)
    found, spread = far.predict((1000 * x[:5] + 1.7e9, 50 * y[:5] - 3), 1000 * x + 1.7e9, return_std=True)
    np.testing.assert_allclose(found, 50 * expected - 3, atol=50 * 2e-3)
    assert spread.shape == x.shape


def test_dates_are_inputs():
    days = [(pd.to_datetime("2020-01-01") + pd.to_timedelta(10 * x, unit="D"), y) for x, y in waves()]
    numbers = [(10 * x, y) for x, y in waves()]
    context = days[0][0][:4], days[0][1][:4]
    by_date = NeuralProcessRegressor(**SMALL).fit(days).predict(context, days[0][0])
    by_number = (
        NeuralProcessRegressor(**SMALL).fit(numbers).predict((numbers[0][0][:4], numbers[0][1][:4]), numbers[0][0])
    )
    np.testing.assert_allclose(by_date, by_number, atol=1e-3)


def test_missing_outputs_are_left_out_and_several_outputs_are_kept_apart():
    tasks = waves()
    holed = [(np.append(x, 2.0), np.append(y, np.nan)) for x, y in tasks]
    x, y = tasks[0]
    plain, with_holes = (NeuralProcessRegressor(**SMALL).fit(t) for t in (tasks, holed))
    np.testing.assert_array_equal(with_holes.predict((x, y), x), plain.predict((x, y), x))
    two = NeuralProcessRegressor(**SMALL).fit([(x, np.column_stack([y, 100 + y])) for x, y in tasks])
    mean, std = two.predict((x[:3], np.column_stack([y[:3], 100 + y[:3]])), x, return_std=True)
    assert mean.shape == std.shape == (len(x), 2)
    assert (mean[:, 1] > 50).all()
    assert (mean[:, 0] < 50).all()


def test_the_random_state_decides_and_the_global_generators_are_left_alone():
    np.random.seed(1)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    one, two = (NeuralProcessRegressor(**SMALL).fit(waves()) for _ in range(2))
    other = clone(one).set_params(random_state=1).fit(waves())
    np.testing.assert_array_equal(one.log_likelihoods_, two.log_likelihoods_)
    assert not np.array_equal(one.log_likelihoods_, other.log_likelihoods_)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_an_interrupted_fit_leaves_a_usable_estimator(monkeypatch):
    step, calls = torch.optim.AdamW.step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)
    with pytest.warns(ConvergenceWarning, match="after 3 of 5 steps"):
        estimator = NeuralProcessRegressor(**SMALL).fit(waves())
    assert estimator.n_steps_ == len(estimator.log_likelihoods_) == 3
    x, y = waves(1)[0]
    assert np.isfinite(estimator.predict((x[:3], y[:3]), x)).all()


def test_an_empty_context_gives_the_prior_and_a_far_query_a_warning_in_the_users_units():
    estimator = NeuralProcessRegressor(**SMALL).fit(waves(scale=100.0))
    prior = estimator.predict(([], []), [100.0, 300.0])
    assert prior[0] == prior[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.predict(([100.0], [0.0]), [650.0])
    with pytest.warns(AliasingWarning, match="lie 1400 apart; .* Fit with x_range=1400"):
        estimator.predict(([100.0], [0.0]), [1500.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NeuralProcessRegressor(**SMALL, x_range=1400.0).fit(waves(scale=100.0)).predict(([100.0], [0.0]), [1500.0])


def test_progress_is_shown_when_asked_for(capsys):
    NeuralProcessRegressor(**SMALL, verbose=True).fit(waves())
    assert "step 5 of 5" in capsys.readouterr().err
    NeuralProcessRegressor(**SMALL).fit(waves())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([], "no tasks"),
        ([([1.0], [2.0])], "no series has two points"),
        ([([1.0, 2.0], [2.0])], "task 0 has 2 inputs and 1 outputs"),
        ([([1.0, np.nan], [2.0, 1.0])], "not finite"),
        ([([1.0, 2.0], [2.0, np.inf])], "infinite output"),
        ([([1.0, 2.0], [2.0, 1.0]), (np.ones((3, 2)), np.ones(3))], "differ in their dimensions"),
        ([(["a", "b"], [1.0, 2.0])], "must hold numbers or dates"),
        ([np.ones(3)], "list of pairs"),
        (pd.DataFrame({"t": [1.0]}), "no column 'series', 'x', 'y'; it has t"),
        (pd.DataFrame({"series": ["a", None], "x": [1.0, 2.0], "y": [0.0, 1.0]}), "1 rows name no series"),
        ([(np.array(["2024-01-01", "NaT"], "M8[ns]"), [1.0, 2.0])], "not finite"),
        ([(["2024-01-01", "2024-01-02"], [1.0, 2.0])], "pandas.to_datetime"),
        (
            [(np.arange(3.0), np.stack([np.arange(3.0), np.full(3, np.nan)], axis=1))],
            "output 1 is missing in every point",
        ),
        ([*waves(), (np.linspace(0, 4e5, 20), np.zeros(20))], "the widest series is .* times as wide"),
    ],
)
def test_series_that_cannot_be_learnt_from_are_refused(tasks, message):
    with pytest.raises(ValueError, match=message):
        NeuralProcessRegressor(**SMALL).fit(tasks)


def test_arguments_and_contexts_that_do_not_fit_are_refused():
    with pytest.raises(NotFittedError):
        NeuralProcessRegressor().predict(([0.0], [0.0]), [1.0])
    for bad, message in (
        ({"n_steps": 0}, "n_steps"),
        ({"n_steps": 2.0}, "n_steps"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"context": (5, 2)}, "context must be"),
        ({"context": None}, "context must be"),
        ({"x_range": -1.0}, "x_range"),
    ):
        with pytest.raises(ValueError, match=message):
            NeuralProcessRegressor(**{**SMALL, **bad}).fit(waves())
    estimator = NeuralProcessRegressor(**SMALL).fit(waves())
    with pytest.raises(ValueError, match="context must be a pair"):
        estimator.predict(None, [1.0])
    with pytest.raises(ValueError, match="inputs of 1 and outputs of 1"):
        estimator.predict((np.ones((2, 2)), [1.0, 2.0]), np.ones((1, 2)))


def test_dates_of_every_kind_are_the_same_days():
    days = pd.DatetimeIndex([pd.Timestamp("2257-12-30"), pd.Timestamp("2258-01-02 12:00"), pd.Timestamp("2265-06-01")])
    expected = np.array([0.0, 3.5, 2710.0])
    kinds = {
        "numpy, seconds": days.to_numpy().astype("M8[s]"),
        "timestamps": list(days),
        "datetimes": [day.to_pydatetime() for day in days],
        "a zone": pd.Series(days.tz_localize("Europe/Berlin")),
    }
    for name, dates in kinds.items():
        found = read_inputs(dates)[:, 0]
        np.testing.assert_allclose(found - found[0], expected, atol=1e-9 if name != "a zone" else 0.05)  # summer time
    lengths = read_inputs(np.array([36, 12], "m8[h]"))[:, 0]
    np.testing.assert_allclose(lengths, [1.5, 0.5])


def test_a_fit_that_fails_leaves_the_estimator_as_it_was():
    estimator = NeuralProcessRegressor(**SMALL).fit(waves())
    x, y = waves(1)[0]
    before = estimator.predict((x[:3], y[:3]), x)
    with pytest.raises(ValueError, match="as wide"):
        estimator.fit([*waves(scale=100.0), (np.linspace(0, 4e7, 20), np.zeros(20))])
    with pytest.raises(RuntimeError, match=r"diverged in step .* lower learning_rate"):
        estimator.set_params(learning_rate=1e12, n_steps=200).fit(waves(scale=100.0))
    np.testing.assert_array_equal(estimator.predict((x[:3], y[:3]), x), before)
