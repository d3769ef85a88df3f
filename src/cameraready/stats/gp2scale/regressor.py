"""The estimator: exact Gaussian-process regression with compactly supported kernels, as scikit-learn knows regressors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data

from cameraready.stats.gp2scale import setting
from cameraready.stats.gp2scale.algebra.system import System
from cameraready.stats.gp2scale.kernels.base import SparseKernel, count_points
from cameraready.stats.gp2scale.likelihood import Evaluation, LogLikelihood
from cameraready.stats.gp2scale.posterior import Posterior, draws, predict_block, warn_of_empty
from cameraready.stats.gp2scale.search import Trace

Noise = float | Literal["learn"] | Callable[[Any], np.ndarray] | np.ndarray


class SparseGPRegressor(RegressorMixin, BaseEstimator):
    """Exact Gaussian-process regression on 10^3 to 10^6 points, by kernels with exact zeros.

    The covariance matrix is sparse, is never approximated and is factored by a sparse Cholesky method: mean, variance,
    likelihood and gradient equal those of a dense Gaussian process with the same kernel. Kernels that are not positive
    definite are found out: no likelihood comes from an indefinite matrix.

    Use it when points outnumber what a dense process can hold (some 10^4) and lie in few dimensions, when the noise differs
    from point to point, or when the inputs are not vectors. Do not use it when every point correlates with most others (the
    matrix is then dense), or in many dimensions, where neighbourhoods hold either everything or nothing.

    Parameters
    ----------
    kernel: a kernel of this package; None takes Amplitude * Wendland with a radius, and bounds for it, from the distances
        between neighbours.
    noise: variance of the observations: a number; "learn" for one learned variance; a callable X -> (n,); or an array (n,).
        As scikit-learn's alpha it is added to the diagonal, so with `normalize_y` it is in units of the normalised variance.
    noise_bounds: bounds for a learned variance; None takes 1e-6 to 10 times the mean square of y.
    mean: a number; "learn" for a constant by generalised least squares, whose uncertainty enters the variances; or a callable
        X -> (n,).
    solver: "cholesky" factors exactly; "cg" solves by preconditioned conjugate gradients with a stochastic log-determinant,
        whose relative error is some 1e-3 to 1e-2; "auto" takes the first when the factor fits in `max_factor_bytes`.
    backend: of the factorisation: "auto" and "multifrontal" are ours; "superlu", "qdldl", "cholmod" other libraries'.
    optimizer: "lbfgs" (exact gradients), "mcmc" (the paper's Metropolis-Hastings, prior uniform in log-hyper-parameters
        within the bounds; `kernel_` is the best state, with which predictions are made, `samples_` keeps the chain), or None.
    n_restarts_optimizer: further starts, drawn within the bounds, or further chains.
    max_iter: of each L-BFGS run.
    n_samples: Metropolis-Hastings steps of each chain; the first half adapts and is not kept.
    normalize_y: whether to work on y with its mean removed and its standard deviation divided out.
    max_factor_bytes: see solver.
    tol: relative residual of conjugate gradients.
    n_probes: random vectors of the stochastic log-determinant.
    random_state: seed of restarts, chains and probes.

    Attributes
    ----------
    kernel_, noise_ (a number, or (n,)), mean_ (a number or a callable), theta_ (natural logarithms),
    log_marginal_likelihood_value_, sparsity_ (the share of non-zeros of K), samples_ (kept, len(theta): states as theta_),
    sample_log_likelihoods_, acceptance_rate_, solver_ (what factored), factor_nonzeros_, n_iter_ (of
    the longest run), X_train_, y_train_.

    References
    ----------
    Noack, Risser, Luo, Tekriwal and Pandolfi, 2026, arXiv:2512.06143. Our factorisation, gradients and checks are not theirs.

    Examples
    --------
    >>> import numpy as np
    >>> from cameraready.stats.gp2scale import SparseGPRegressor, Wendland
    >>> x = np.linspace(0, 1, 500)[:, None]
    >>> model = SparseGPRegressor(Wendland(0.2), noise="learn", random_state=0).fit(x, np.sin(9 * x[:, 0]))
    >>> mean, std = model.predict(x[:3], return_std=True)
    """

    def __init__(
        self,
        kernel: SparseKernel | None = None,
        *,
        noise: Noise = 1e-2,
        noise_bounds: Any = None,
        mean: float | Literal["learn"] | Callable[[Any], np.ndarray] = 0.0,
        solver: Literal["auto", "cholesky", "cg"] = "auto",
        backend: Literal["auto", "multifrontal", "superlu", "qdldl", "cholmod"] = "auto",
        optimizer: Literal["lbfgs", "mcmc"] | None = "lbfgs",
        n_restarts_optimizer: int = 0,
        max_iter: int = 100,
        n_samples: int = 1000,
        normalize_y: bool = False,
        max_factor_bytes: float = 8 * 2**30,
        tol: float = 1e-8,
        n_probes: int = 32,
        random_state: Any = None,
    ):
        self.kernel = kernel
        self.noise = noise
        self.noise_bounds = noise_bounds
        self.mean = mean
        self.solver = solver
        self.backend = backend
        self.optimizer = optimizer
        self.n_restarts_optimizer = n_restarts_optimizer
        self.max_iter = max_iter
        self.n_samples = n_samples
        self.normalize_y = normalize_y
        self.max_factor_bytes = max_factor_bytes
        self.tol = tol
        self.n_probes = n_probes
        self.random_state = random_state

    def fit(self, X: Any, y: Any, client: Any = None) -> SparseGPRegressor:
        """Find the hyper-parameters and factor the covariance; returns the estimator.

        Raises ValueError for unusable data or a start outside its bounds, NotPositiveDefinite for a kernel that is not positive
        definite at the start; the estimator is then as it was before. Interrupted (Ctrl-C), it keeps the best hyper-parameters so
        far and is ready to predict. Warns ConvergenceWarning for hyper-parameters that end at a bound.

        Parameters
        ----------
        X: (n, d), or any sequence of n inputs when the kernel does not require vectors. y: (n,).
        client: a `distributed.Client`; assembly, starts and chains then run on its workers, with the same result.
        """
        before, trace = self.__dict__.copy(), Trace()
        try:
            return self._fit(X, y, client, trace)
        except BaseException as error:
            settled = self.__dict__.get("theta_") is not before.get("theta_")
            if not (settled and (trace.evaluations or isinstance(error, KeyboardInterrupt))):
                self.__dict__.clear()
                self.__dict__.update(before)
            raise

    def _fit(self, X: Any, y: Any, client: Any, trace: Trace) -> SparseGPRegressor:
        setting.check_options(self)
        X, y = self._checked(X, y, first=True)
        generator = check_random_state(self.random_state)
        self.X_train_, self.y_train_ = X, y
        residual = y - setting.given_mean(self.mean, X)
        self._shift, self._unit = setting.units(residual) if self.normalize_y else (0.0, 1.0)
        residual = (residual - self._shift) / self._unit
        kernel = setting.default_kernel(X, residual) if self.kernel is None else self.kernel
        kernel.diag(X[:1])  # its parameters are looked at before anything is built on them
        noise = setting.noise_variances(self.noise, X, self.noise_bounds)
        if noise is not None and kernel.requires_vector_input:
            setting.refuse_noiseless_duplicates(X, noise)
        coordinates = X if kernel.requires_vector_input else None
        system = System(
            len(y), coordinates, solver=self.solver, backend=self.backend, max_factor_bytes=self.max_factor_bytes,
            tol=self.tol, n_probes=self.n_probes, seed=int(generator.randint(2**31 - 1)),
        )  # fmt: skip
        self._likelihood = LogLikelihood(
            kernel, X, residual, noise=noise, learn_mean=self.mean == "learn", system=system
        )
        self._search(setting.Plan.of(self, self._likelihood, generator), client, trace)
        return self

    def _search(self, plan: setting.Plan, client: Any, trace: Trace) -> None:
        """Run the optimizer; whatever stops it, the best point so far becomes the fitted one."""
        self._posterior: Posterior | None = None
        likelihood = self._likelihood
        try:
            plan.run(likelihood, trace, client)
            self._settle(trace, plan)
            plan.warn_at_bounds(self.theta_)
            with plan.assembling(likelihood, client):
                self._posterior_at_theta()
        except BaseException as error:
            if trace.evaluations or isinstance(error, KeyboardInterrupt):
                self._settle(trace, plan)
            raise

    def _settle(self, trace: Trace, plan: setting.Plan) -> None:
        """Set the attributes that follow from the search."""
        self.theta_ = plan.starts[0] if trace.theta is None else trace.theta
        kernel, noise = self._likelihood.split(self.theta_)
        self.kernel_ = kernel
        given = self._likelihood.noise is not None and (callable(self.noise) or np.ndim(self.noise) > 0)
        self.noise_ = noise if given else float(noise[0])
        self.n_iter_ = max(1, trace.iterations)
        self.mean_ = self.mean if self.mean != "learn" else float("nan")
        self.samples_ = np.array(trace.samples).reshape(len(trace.samples), len(self.theta_))
        self.sample_log_likelihoods_ = np.array(trace.values)
        self.acceptance_rate_ = trace.accepted / trace.proposed if trace.proposed else float("nan")

    def _posterior_at_theta(self) -> Posterior:
        """The posterior, computed when it is first needed (an interrupted fit has none yet)."""
        if self._posterior is None:
            evaluation: Evaluation = self._likelihood(self.theta_)
            self.log_marginal_likelihood_value_ = evaluation.value
            self.sparsity_ = evaluation.density
            self.solver_ = self._likelihood.system.used
            self.factor_nonzeros_ = evaluation.factor.nonzeros
            if self.mean == "learn":
                self.mean_ = self._shift + self._unit * evaluation.mean
            self._posterior = Posterior(evaluation, self.X_train_)
        return self._posterior

    def predict(
        self,
        X: Any,
        return_std: bool = False,
        return_cov: bool = False,
        *,
        include_noise: bool = False,
        client: Any = None,
    ) -> Any:
        """The posterior mean (m,) at X, and its standard deviation (m,) or covariance (m, m).

        Warns EmptyNeighbourhood for points that no training point reaches.

        Parameters
        ----------
        return_std, return_cov: of the latent function, not of a new observation, unless `include_noise`.
        include_noise: adds the noise variance; not defined for a noise given as an array.
        client: a `distributed.Client` to spread the points over (means and standard deviations).
        """
        check_is_fitted(self, "theta_")
        if return_std and return_cov:
            raise ValueError("ask for return_std or return_cov, not both")
        X, _ = self._checked(X, None, first=False)
        posterior = self._posterior_at_theta()
        given = self._shift + setting.given_mean(self.mean, X)
        noise = setting.noise_at(self, X) if include_noise else 0.0
        if return_cov:
            mean, covariance, empty = posterior.covariance(X)
            covariance[np.diag_indices_from(covariance)] += noise
            warn_of_empty(empty, len(mean))
            return given + self._unit * mean, self._unit**2 * covariance
        mean, variance, empty = setting.predict_spread(posterior, X, return_std, client, predict_block)
        warn_of_empty(empty, len(mean))
        mean = given + self._unit * mean
        return mean if variance is None else (mean, self._unit * np.sqrt(variance + noise))

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draws of the latent function at X from the posterior, (m, n_samples); m^3 operations."""
        mean, covariance = self.predict(X, return_cov=True)
        return draws(mean, covariance, n_samples, check_random_state(random_state))

    def log_marginal_likelihood(self, theta: Any = None, eval_gradient: bool = False) -> Any:
        """The log marginal likelihood of theta = [log kernel hyper-parameters, log noise if it is learned].

        With theta None that of `theta_`. With `eval_gradient` also the gradient (len(theta),). Like scikit-learn's it is that
        of the normalised y. Raises NotPositiveDefinite.
        """
        check_is_fitted(self, "theta_")
        if theta is None and not eval_gradient:
            self._posterior_at_theta()
            return self.log_marginal_likelihood_value_
        found = self._likelihood(self.theta_ if theta is None else np.asarray(theta, dtype=float), eval_gradient)
        return (found.value, found.gradient) if eval_gradient else found.value

    def _checked(self, X: Any, y: Any, *, first: bool) -> tuple[Any, Any]:
        """X and y as arrays; X stays as it is for kernels on other inputs."""
        if self.kernel is None or self.kernel.requires_vector_input:
            if not first:
                return validate_data(self, X, dtype=np.float64, reset=False), None
            X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True, copy=True)
            return X, np.array(y)
        if isinstance(X, str):
            raise ValueError("X must be a sequence of inputs, got one string")
        X = X.to_numpy() if hasattr(X, "to_numpy") else X  # a pandas series would be indexed by its labels
        if not first:
            return X, None
        X = X.copy() if hasattr(X, "copy") else list(X)
        y = column_or_1d(check_array(y, ensure_2d=False, dtype=np.float64, copy=True), warn=True)
        check_consistent_length(X, y)
        if not count_points(X):
            raise ValueError("X holds no points")
        return X, y
