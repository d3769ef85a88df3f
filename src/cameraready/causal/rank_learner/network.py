"""A small neural network in NumPy (one hidden ReLU layer, Adam, early stopping), and torch modules as estimators.

At the sizes at hand (tens of features, 64 hidden units, batches of 64 rows) a step costs a tenth of a millisecond, which a
general framework spends on dispatching alone. Source of the architecture and the initialisation: the authors' code of Arno et al., 2026, arXiv:2602.03517.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

from cameraready.causal.rank_learner.objective import Objective, RowTargets


@dataclass(frozen=True)
class Training:
    """How a network is trained.

    Attributes
    ----------
    hidden : int
        Units of the hidden layer.
    learning_rate, weight_decay : float
        Adam's; the decay is added to the gradient, as in `torch.optim.Adam`.
    max_epochs : int
        Passes over the objective's batches.
    min_steps : int
        Small tables get as many epochs as make this many steps, whatever `max_epochs` says.
    patience : int
        Checks without improvement before training ends; the best weights are kept.
    min_gain : float
        What counts as an improvement.
    check_every : int
        Steps between two looks at the validation rows; one epoch where 0.
    batch : int
        Rows a step.
    keep_untrained : bool
        Whether the initial weights may be the best ones, as they are where there is nothing but noise.
    """

    hidden: int = 64
    learning_rate: float = 5e-3
    weight_decay: float = 1e-4
    max_epochs: int = 60
    min_steps: int = 600
    patience: int = 8
    min_gain: float = 1e-4
    check_every: int = 20
    batch: int = 64
    keep_untrained: bool = True


class Network:
    """x (n, d) -> W2 relu(W1 x + b1) + b2, shape (n,). All weights are one vector, which Adam updates at once."""

    def __init__(self, n_features: int, hidden: int, generator: np.random.Generator) -> None:
        self.n_features, self.hidden = n_features, hidden
        wide, narrow = 1.0 / np.sqrt(max(n_features, 1)), 1.0 / np.sqrt(hidden)
        self.weights = np.concatenate(
            [
                generator.uniform(-wide, wide, n_features * hidden),
                generator.uniform(-wide, wide, hidden),
                generator.uniform(-narrow, narrow, hidden + 1),
            ]
        )

    def parts(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Views of a vector like `weights`: W1 (d, hidden), b1 (hidden,), W2 (hidden,), b2 (1,)."""
        size = self.n_features * self.hidden
        inner = vector[:size].reshape(self.n_features, self.hidden)
        return inner, vector[size : size + self.hidden], vector[size + self.hidden : -1], vector[-1:]

    def __call__(self, X: np.ndarray) -> np.ndarray:
        inner, bias, outer, shift = self.parts(self.weights)
        return np.maximum(X @ inner + bias, 0.0) @ outer + shift[0]

    def slopes(self, X: np.ndarray, slope_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Gradient by the weights, for a loss whose slope in the outputs is `slope_of(outputs)`."""
        inner, bias, outer, shift = self.parts(self.weights)
        active = X @ inner
        active += bias
        np.maximum(active, 0.0, out=active)
        slope = slope_of(active @ outer + shift[0])
        back = (active > 0.0) * slope[:, None]
        back *= outer
        found = np.empty_like(self.weights)
        inner_slope, bias_slope, outer_slope, shift_slope = self.parts(found)
        np.dot(X.T, back, out=inner_slope)
        np.sum(back, axis=0, out=bias_slope)
        np.dot(slope, active, out=outer_slope)
        shift_slope[0] = slope.sum()
        return found


def minimise(
    network: Network,
    X: np.ndarray,
    objective: Objective,
    validation: Callable[[Network], float],
    training: Training,
    generator: np.random.Generator,
) -> int:
    """Train `network` in place until `validation` (smaller is better) stops falling; returns the number of steps.

    The weights with the smallest validation value are restored; a value that is not finite never counts as an improvement.
    """
    mean, square = np.zeros_like(network.weights), np.zeros_like(network.weights)
    best = validation(network) if training.keep_untrained else np.inf
    kept = network.weights.copy()
    steps, waited, epochs = 0, 0, 0
    while True:
        batches = objective.batches(generator)
        check = training.check_every or len(batches)
        for rows in batches:
            slope = network.slopes(X[rows], lambda scores, rows=rows: objective.slope(rows, scores))
            steps += 1
            _adam(network.weights, slope, mean, square, steps, training)
            if steps % check == 0:
                value = validation(network)
                if value < best - training.min_gain:
                    best, kept, waited = value, network.weights.copy(), 0
                else:
                    waited += 1
                if waited >= training.patience:
                    network.weights = kept
                    return steps
        epochs += 1
        if epochs >= training.max_epochs and steps >= training.min_steps:
            network.weights = kept
            return steps


def _adam(
    weights: np.ndarray, slope: np.ndarray, mean: np.ndarray, square: np.ndarray, step: int, training: Training
) -> None:
    """One step of Adam (Kingma and Ba, 2015, arXiv:1412.6980, Alg. 1), in place."""
    size = training.learning_rate * np.sqrt(1.0 - 0.999**step) / (1.0 - 0.9**step)
    tiny = 1e-8 * np.sqrt(1.0 - 0.999**step)
    if training.weight_decay:
        slope += training.weight_decay * weights
    mean *= 0.9
    mean += 0.1 * slope
    slope *= slope
    square *= 0.999
    square += 0.001 * slope
    np.sqrt(square, out=slope)
    slope += tiny
    np.divide(mean, slope, out=slope)
    slope *= size
    weights -= slope


class NetworkModel(BaseEstimator):
    """What the two estimators below share: scaling, the split for early stopping, training."""

    def __init__(self, training: Training | None = None, random_state: int | None = None) -> None:
        self.training = training
        self.random_state = random_state

    def _fit(self, X: Any, targets: np.ndarray, *, logistic: bool) -> None:
        X = np.asarray(X, dtype=float)
        training = self.training or Training()
        generator = np.random.default_rng(self.random_state)
        self.network_ = Network(X.shape[1], training.hidden, generator)
        held, train = held_out(len(X), generator)
        objective = RowTargets(targets[train], training.batch, logistic)

        def validation(network: Network) -> float:
            scores = network(X[held])
            if logistic:
                return float(np.mean(np.logaddexp(0.0, scores) - targets[held] * scores))
            return float(np.mean((scores - targets[held]) ** 2))

        self.n_steps_ = minimise(self.network_, X[train], objective, validation, training, generator)


class NetworkRegressor(RegressorMixin, NetworkModel):
    """One hidden layer, squared error. Expects standardised features (n, n_features)."""

    def fit(self, X: Any, y: Any) -> NetworkRegressor:
        y = np.asarray(y, dtype=float)
        self.shift_, self.scale_ = float(y.mean()), float(y.std()) or 1.0
        self._fit(X, (y - self.shift_) / self.scale_, logistic=False)
        return self

    def predict(self, X: Any) -> np.ndarray:
        return self.shift_ + self.scale_ * self.network_(np.asarray(X, dtype=float))


class NetworkClassifier(ClassifierMixin, NetworkModel):
    """One hidden layer, logistic loss, for labels 0 and 1. Expects standardised features (n, n_features)."""

    def fit(self, X: Any, y: Any) -> NetworkClassifier:
        self.classes_ = np.array([0, 1])
        self._fit(X, np.asarray(y, dtype=float), logistic=True)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        p = expit(self.network_(np.asarray(X, dtype=float)))
        return np.column_stack([1.0 - p, p])

    def predict(self, X: Any) -> np.ndarray:
        return (self.predict_proba(X)[:, 1] > 0.5).astype(int)


def held_out(n: int, generator: np.random.Generator, share: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """Rows for validation (at least one) and for training, at random."""
    order = generator.permutation(n)
    size = max(1, int(share * n))
    return order[:size], order[size:]


class TorchModel(BaseEstimator):
    """Trains a copy of a torch module with Adam; a fifth of the rows decides when to stop.

    Parameters
    ----------
    module : torch.nn.Module
        (n, n_features) -> (n,) or (n, 1); logits where `classification`. Its dtype and device are kept.
    classification : bool
        Logistic loss on 0/1 targets instead of squared error; `predict` then returns probabilities.
    epochs, patience, batch : int
    learning_rate : float
    seed : int
    """

    def __init__(
        self,
        module: Any,
        *,
        classification: bool = False,
        epochs: int = 200,
        patience: int = 20,
        batch: int = 64,
        learning_rate: float = 5e-3,
        seed: int = 0,
    ) -> None:
        self.module = module
        self.classification = classification
        self.epochs = epochs
        self.patience = patience
        self.batch = batch
        self.learning_rate = learning_rate
        self.seed = seed

    def fit(self, X: Any, y: Any) -> TorchModel:
        """Train on X (n, n_features), y (n,); standardises y where it is not a class."""
        import torch

        self.module_ = copy.deepcopy(self.module)
        like = next(self.module_.parameters(), torch.zeros(1))
        y = np.asarray(y, dtype=float)
        self.shift_ = 0.0 if self.classification else float(y.mean())
        self.scale_ = 1.0 if self.classification else float(y.std()) or 1.0
        inputs = torch.as_tensor(np.asarray(X), dtype=like.dtype, device=like.device)
        targets = torch.as_tensor((y - self.shift_) / self.scale_, dtype=like.dtype, device=like.device)
        order = np.random.default_rng(self.seed).permutation(len(y))
        held, train = order[: max(1, len(y) // 5)], order[max(1, len(y) // 5) :]
        loss_of = torch.nn.BCEWithLogitsLoss() if self.classification else torch.nn.MSELoss()
        optimiser = torch.optim.Adam(self.module_.parameters(), lr=self.learning_rate)
        best, kept, waited = np.inf, copy.deepcopy(self.module_.state_dict()), 0
        generator = np.random.default_rng([self.seed, 1])
        for _ in range(self.epochs):
            self.module_.train()
            for rows in np.array_split(generator.permutation(train), max(1, len(train) // self.batch)):
                optimiser.zero_grad()
                loss_of(self._outputs(inputs[rows]), targets[rows]).backward()
                optimiser.step()
            self.module_.eval()
            with torch.no_grad():
                value = float(loss_of(self._outputs(inputs[held]), targets[held]))
            if value < best - 1e-5:
                best, kept, waited = value, copy.deepcopy(self.module_.state_dict()), 0
            else:
                waited += 1
                if waited >= self.patience:
                    break
        self.module_.load_state_dict(kept)
        self.module_.eval()
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Predicted means (n,), float64."""
        import torch

        like = next(self.module_.parameters(), torch.zeros(1))
        with torch.no_grad():
            outputs = self._outputs(torch.as_tensor(np.asarray(X), dtype=like.dtype, device=like.device))
            if self.classification:
                outputs = torch.sigmoid(outputs)
        return self.shift_ + self.scale_ * outputs.double().cpu().numpy()

    def _outputs(self, inputs: Any) -> Any:
        outputs = self.module_(inputs)
        if outputs.numel() != len(inputs):
            raise ValueError(f"the module must return one number a row, got shape {tuple(outputs.shape)}")
        return outputs.reshape(len(inputs))
