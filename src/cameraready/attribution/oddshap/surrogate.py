"""The tree surrogate that proposes interactions: how it is fitted, and how its trees are read."""

from __future__ import annotations

from typing import Any

import numpy as np

from cameraready.attribution.oddshap.spectrum import Forest

#: The paper's surrogate: LightGBM of depth 10, otherwise at its defaults.
N_TREES, LEARNING_RATE, MAX_LEAVES, MAX_DEPTH = 100, 0.1, 31, 10


def _rows_per_leaf(n_rows: int) -> int:
    """LightGBM's default of 20, or fewer below 400 rows, where it would leave hardly a split and below 40 none."""
    return min(20, max(5, n_rows // 20))


def fit_surrogate(surrogate: Any, coalitions: np.ndarray, values: np.ndarray, seed: int) -> Forest:
    """Fit trees to a game's values.

    Parameters
    ----------
    surrogate : {"boosting", "lightgbm"} or estimator
        ``"boosting"`` grows the trees that LightGBM grows with these settings, compiled for 0/1 features, several times
        faster; ``"lightgbm"`` calls the library; an estimator is a scikit-learn compatible regressor made of trees,
        of which a clone is fitted.
    coalitions : bool array (m, n_players)
    values : float array (m,)
    seed : int
        For the library or estimator; ``"boosting"`` has no randomness.

    Returns
    -------
    Forest
        In units of the values, less a constant.
    """
    if len(values) == 0 or values.std() <= 1e-13 * np.abs(values).max():  # nothing, or constant to rounding
        return Forest(np.zeros(0, dtype=np.int64), np.zeros((0, 2), dtype=np.int64), np.zeros(1), np.array([-1]))
    mean, spread = values.mean(), values.std()
    # In units of the spread, so that no absolute threshold inside a library decides whether small values are split.
    target = (values - mean) / spread
    if isinstance(surrogate, str):
        forest = _boosted(coalitions, target) if surrogate == "boosting" else _lightgbm(coalitions, target, seed)
    else:
        from sklearn.base import clone

        model = clone(surrogate)
        if "random_state" in model.get_params() and model.get_params()["random_state"] is None:
            model.set_params(random_state=seed)
        forest = read_forest(model.fit(coalitions.astype(np.float32), target))
    return Forest(forest.feature, forest.children, forest.leaf_value * spread, forest.roots)


def read_forest(model: Any) -> Forest:
    """Trees of a fitted LightGBM model, or of scikit-learn's trees, forests and gradient boosting, over 0/1 features.

    Raises
    ------
    TypeError
        For any other model.
    """
    if hasattr(model, "booster_"):
        model = model.booster_
    if hasattr(model, "model_to_string"):
        return _read_lightgbm(model.model_to_string())
    if hasattr(model, "tree_"):
        return _read_sklearn([model], [1.0])
    if hasattr(model, "_predictors"):  # HistGradientBoostingRegressor keeps its trees here and nowhere public
        return _read_histogram([predictor for (predictor,) in model._predictors])
    members = np.ravel(getattr(model, "estimators_", []))
    if len(members) and all(hasattr(member, "tree_") for member in members):
        # Boosting adds trees times the learning rate, a forest averages them.
        weight = getattr(model, "learning_rate", 1.0 / len(members))
        return _read_sklearn(list(members), [weight] * len(members))
    raise TypeError(
        f"the surrogate {type(model).__name__} has no trees that can be read; use 'boosting', 'lightgbm', an LGBMRegressor, or "
        "scikit-learn's DecisionTreeRegressor, RandomForestRegressor, ExtraTreesRegressor, GradientBoostingRegressor "
        "or HistGradientBoostingRegressor"
    )


def _boosted(coalitions: np.ndarray, target: np.ndarray) -> Forest:
    from cameraready.attribution.oddshap.boosting import grow

    bits = np.ascontiguousarray(coalitions, dtype=np.uint8)
    feature, children, value, n_leaves = grow(
        bits,
        np.array(target, dtype=np.float64),
        N_TREES,
        LEARNING_RATE,
        MAX_LEAVES,
        MAX_DEPTH,
        _rows_per_leaf(len(target)),
    )
    leaf = np.arange(MAX_LEAVES) < n_leaves[:, None]
    node = leaf[:, 1:]
    return _joined(feature[node], children[node], value[leaf], n_leaves)


def _lightgbm(coalitions: np.ndarray, target: np.ndarray, seed: int) -> Forest:
    try:
        import lightgbm
    except ImportError as error:
        raise ImportError("surrogate='lightgbm' needs LightGBM: pip install 'cameraready[attribution]'") from error
    parameters = {
        "objective": "regression",
        "learning_rate": LEARNING_RATE,
        "num_leaves": MAX_LEAVES,
        "max_depth": MAX_DEPTH,
        "min_data_in_leaf": _rows_per_leaf(len(target)),
        "max_bin": 2,  # all that a 0/1 feature has
        "min_data_in_bin": 1,
        "num_threads": 1,
        "seed": seed,
        "verbosity": -1,
    }
    data = lightgbm.Dataset(coalitions.astype(np.float32), target.astype(np.float32), params=parameters)
    return _read_lightgbm(lightgbm.train(parameters, data, N_TREES).model_to_string())


def _read_lightgbm(text: str) -> Forest:
    """Trees of a LightGBM model string; ten times faster than its JSON dump."""
    wanted = ("split_feature=", "threshold=", "left_child=", "right_child=", "leaf_value=")
    lines: dict[str, list[str]] = {name: [] for name in wanted}
    n_leaves = []
    for line in text[: text.index("end of trees")].splitlines():
        name = line[: line.find("=") + 1]
        if name == "num_leaves=":
            n_leaves.append(int(line[len(name) :]))
        elif name in lines:
            lines[name].append(line[len(name) :])
    feature, threshold, left, right, value = (np.array(" ".join(lines[name]).split(), dtype=float) for name in wanted)
    children = np.stack([left, right], axis=1).astype(np.int64)
    return simplified(_joined(feature.astype(np.int64), children, value, np.array(n_leaves)), threshold)


def _read_sklearn(trees: list[Any], weights: list[float]) -> Forest:
    features, thresholds, children, values, n_leaves = [], [], [], [], []
    for member, weight in zip(trees, weights, strict=True):
        tree = member.tree_
        leaf = tree.children_left < 0
        features.append(tree.feature[~leaf])
        thresholds.append(tree.threshold[~leaf])
        children.append(_renumbered(leaf, np.stack([tree.children_left, tree.children_right], axis=1)))
        values.append(tree.value[leaf, 0, 0] * weight)
        n_leaves.append(int(leaf.sum()))
    forest = _joined(
        np.concatenate(features).astype(np.int64), np.concatenate(children), np.concatenate(values), np.array(n_leaves)
    )
    return simplified(forest, np.concatenate(thresholds))


def _read_histogram(predictors: list[Any]) -> Forest:
    features, thresholds, children, values, n_leaves = [], [], [], [], []
    for nodes in (predictor.nodes for predictor in predictors):
        leaf = nodes["is_leaf"].astype(bool)
        features.append(nodes["feature_idx"][~leaf])
        thresholds.append(nodes["num_threshold"][~leaf])
        children.append(_renumbered(leaf, np.stack([nodes["left"], nodes["right"]], axis=1).astype(np.int64)))
        values.append(nodes["value"][leaf])
        n_leaves.append(int(leaf.sum()))
    forest = _joined(
        np.concatenate(features).astype(np.int64), np.concatenate(children), np.concatenate(values), np.array(n_leaves)
    )
    return simplified(forest, np.concatenate(thresholds))


def _renumbered(leaf: np.ndarray, children: np.ndarray) -> np.ndarray:
    """Children (n_nodes, 2) of a tree that numbers nodes and leaves together, as those of its inner nodes alone."""
    number = np.where(leaf, -np.cumsum(leaf), np.cumsum(~leaf) - 1)
    return number[children[~leaf]]


def _joined(feature: np.ndarray, children: np.ndarray, leaf_value: np.ndarray, n_leaves: np.ndarray) -> Forest:
    """One forest of trees whose nodes and leaves are numbered from zero in each; a tree's first node is its root."""
    n_nodes = n_leaves - 1
    first_node, first_leaf = np.cumsum(n_nodes) - n_nodes, np.cumsum(n_leaves) - n_leaves
    of_node = np.repeat(np.arange(len(n_leaves)), n_nodes)[:, None]
    children = np.where(children >= 0, children + first_node[of_node], children - first_leaf[of_node])
    roots = np.where(n_nodes > 0, first_node, -1 - first_leaf)
    return Forest(feature.astype(np.int64), children.astype(np.int64), leaf_value, roots)


def simplified(forest: Forest, threshold: np.ndarray) -> Forest:
    """The forest without the splits that decide nothing: thresholds outside [0, 1), features met before on the path.

    `threshold` has shape (n_nodes,); a row goes to the first child where its feature is at most the threshold.
    """
    forced = np.where(threshold >= 1, 0, np.where(threshold < 0, 1, -1))
    if not (forced >= 0).any() and not _repeats(forest):
        return forest
    children = forest.children.copy()
    roots = forest.roots.copy()

    def settled(node: int, known: dict[int, int]) -> int:
        """The node that stands in the place of `node` once the features in `known` have their values."""
        while node >= 0:
            feature = int(forest.feature[node])
            side = known.get(feature, int(forced[node]))
            if side < 0:
                children[node] = [settled(int(forest.children[node, v]), {**known, feature: v}) for v in (0, 1)]
                return node
            node = int(forest.children[node, side])
        return node

    for index, root in enumerate(forest.roots):
        roots[index] = settled(int(root), {})
    return Forest(forest.feature, children, forest.leaf_value, roots)


def _repeats(forest: Forest) -> bool:
    node = forest.roots[forest.roots >= 0]
    above = np.zeros((len(node), 0), dtype=np.int64)
    while len(node):
        own = forest.feature[node]
        if (above == own[:, None]).any():
            return True
        children = forest.children[node]
        parent, side = np.nonzero(children >= 0)
        node, above = children[parent, side], np.column_stack([above, own])[parent]
    return False
