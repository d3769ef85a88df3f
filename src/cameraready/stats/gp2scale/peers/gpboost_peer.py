"""The side of the study that runs in GPBoost's own environment: Vecchia's approximation and a compact covariance."""

import time

import gpboost
import numpy as np

NEIGHBOURS = 20  # GPBoost's default


def regress(X, y, X_test, approximation, ard, taper_range, seconds):
    """Mean and standard deviation of y at X_test, by GPBoost's own optimiser (L-BFGS) from its own starting values.

    `approximation`: "vecchia" (Matern 3/2) or "wendland" (compact support of radius `taper_range`). A first iteration is
    timed, and as many are allowed as fit into what is left of `seconds`; at least three.
    """
    options = {
        "vecchia": {"gp_approx": "vecchia", "num_neighbors": NEIGHBOURS, "cov_fct_shape": 1.5},
        "wendland": {"cov_function": "wendland", "cov_fct_taper_range": taper_range, "cov_fct_taper_shape": 1.0},
    }[approximation]
    if approximation == "vecchia":
        options["cov_function"] = "matern_ard" if ard else "matern"

    def fitted(max_iter):
        model = gpboost.GPModel(gp_coords=X, likelihood="gaussian", num_parallel_threads=1, **options)
        model.fit(y=y, X=np.ones((len(y), 1)), params={"maxit": max_iter, "trace": False})
        return model

    started = time.process_time()
    fitted(1)
    one = time.process_time() - started
    model = fitted(max(3, int((seconds - one) / one)))
    fit_seconds = time.process_time() - started
    constant = np.ones((len(X_test), 1))
    found = model.predict(gp_coords_pred=X_test, X_pred=constant, predict_var=True, predict_response=True)
    return {
        "mean": np.asarray(found["mu"], dtype=float),
        "std": np.sqrt(np.asarray(found["var"], dtype=float)),
        "fit_seconds": fit_seconds,
        "steps": int(model._get_num_optim_iter()),
    }
