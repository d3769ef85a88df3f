"""The side of the study that runs in GPyTorch's own environment: SVGP and KISS-GP (SKI), trained for a given time."""

import time
import warnings

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import GridInterpolationKernel, MaternKernel, ScaleKernel
from gpytorch.likelihoods import GaussianLikelihood
from gpytorch.variational import NaturalVariationalDistribution, VariationalStrategy
from sklearn.cluster import KMeans

BATCH = 1024
WINDOW = 50  # steps over which a loss is averaged
torch.set_default_dtype(torch.float64)  # in single precision the covariance of 256 inducing points is not definite


class Stochastic(gpytorch.models.ApproximateGP):
    def __init__(self, inducing, scale, ard):
        distribution = NaturalVariationalDistribution(len(inducing))
        super().__init__(VariationalStrategy(self, inducing, distribution, learn_inducing_locations=True))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=inducing.shape[1] if ard else None))
        self.covar_module.base_kernel.lengthscale = scale

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Interpolated(gpytorch.models.ExactGP):
    def __init__(self, X, y, X_test, likelihood, grid_size, scale):
        super().__init__(X, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        base = MaternKernel(nu=1.5)
        base.lengthscale = scale
        everywhere = torch.cat([X, X_test])  # the grid must reach all points that are asked for
        bounds = [(float(column.min()) - 1e-3, float(column.max()) + 1e-3) for column in everywhere.T]
        grid = GridInterpolationKernel(base, grid_size=grid_size, num_dims=X.shape[1], grid_bounds=bounds)
        self.covar_module = ScaleKernel(grid)

    def forward(self, x):
        return MultivariateNormal(self.mean_module(x), self.covar_module(x))


def with_noise(variance=0.1):
    likelihood = GaussianLikelihood()
    likelihood.noise = variance  # y is standardised; the library's 0.69 takes dozens of steps to leave
    return likelihood


class Training:
    """A model in training: `run(seconds)` goes on for so long, or until the loss no longer falls."""

    def __init__(self, model, likelihood, loss, optimizers):
        self.model, self.likelihood, self.loss, self.optimizers = model, likelihood, loss, optimizers
        self.losses = []

    def run(self, seconds):
        self.model.train(), self.likelihood.train()
        ended = time.process_time() + seconds
        while time.process_time() < ended and not self.settled():
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.losses.append(float(loss.detach()))

    def settled(self):
        if len(self.losses) < 4 * WINDOW or len(self.losses) % WINDOW:
            return False
        before, after = np.mean(self.losses[-2 * WINDOW : -WINDOW]), np.mean(self.losses[-WINDOW:])
        return before - after < 1e-3

    def level(self):
        return float(np.mean(self.losses[-10:])) if self.losses else np.inf

    def predict(self, X_test):
        self.model.eval(), self.likelihood.eval()
        with torch.no_grad(), gpytorch.settings.fast_pred_var():
            found = self.likelihood(self.model(X_test))
            return found.mean.numpy(), found.variance.clamp_min(1e-12).sqrt().numpy()


def raced(starts, X_test, seconds):
    """A fifth of the time for every start, the rest for the one that is ahead; what it predicts, and its cost."""
    started = time.process_time()
    for training in starts:
        training.run(seconds / 5)
    best = min(starts, key=Training.level)
    best.run(seconds * (1 - len(starts) / 5))
    trained = time.process_time() - started
    mean, std = best.predict(X_test)
    steps = sum(len(training.losses) for training in starts)
    return {"mean": mean, "std": std, "fit_seconds": trained, "steps": steps}


def svgp(X, y, X_test, n_inducing, scales, ard, seconds, seed):
    """Mean and standard deviation of y at X_test: natural gradients beside Adam, as GPyTorch's tutorial has it."""
    torch.manual_seed(seed)
    centres = KMeans(n_inducing, n_init=1, max_iter=10, random_state=seed).fit(X).cluster_centers_
    X, y, X_test, inducing = (torch.as_tensor(each) for each in (X, y, X_test, centres))

    def start(scale):
        likelihood, model = with_noise(), Stochastic(inducing.clone(), scale, ard)
        bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))

        def loss():
            rows = torch.randperm(len(y))[:BATCH]
            return -bound(model(X[rows]), y[rows])

        natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.5)
        adam = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=0.05)
        return Training(model, likelihood, loss, [natural, adam])

    return raced([start(scale) for scale in scales], X_test, seconds)


def ski(X, y, X_test, grid_size, scales, seconds, seed):
    """Mean and standard deviation of y at X_test; Adam at 0.1 on the likelihood, as in GPyTorch's tutorial."""
    torch.manual_seed(seed)
    X, y, X_test = (torch.as_tensor(each) for each in (X, y, X_test))

    def start(scale):
        likelihood = with_noise()
        model = Interpolated(X, y, X_test, likelihood, grid_size, scale)
        exact = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
        return Training(model, likelihood, lambda: -exact(model(X), y), [torch.optim.Adam(model.parameters(), lr=0.1)])

    with warnings.catch_warnings(), gpytorch.settings.max_preconditioner_size(0):  # half the time, the same losses
        warnings.simplefilter("ignore")  # on conjugate gradients that stop at their default number of steps
        return raced([start(scale) for scale in scales], X_test, seconds)
