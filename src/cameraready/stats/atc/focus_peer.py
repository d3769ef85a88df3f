"""The side of the study that runs in environments of their own: the exact scans of focus-cpt and changepoint-online."""

import time

import numpy as np


def focus_batch(x):
    """Processor seconds for the statistic after each of the samples, and these statistics, (n,): squares of ours."""
    from focus_cpt import focus_offline

    started = time.thread_time()
    found = focus_offline(x, np.inf, "univariate", "gaussian")
    seconds = time.thread_time() - started
    return {"seconds": seconds, "statistic": np.ravel(found["stat"]).astype(float)}


def focus_stream(x):
    """The same, one sample at a time."""
    from focus_cpt import Detector

    detector, samples = Detector("univariate"), x.tolist()
    statistic = np.empty(len(samples))
    started = time.thread_time()
    for i, value in enumerate(samples):
        detector.update(value)
        statistic[i] = np.ravel(detector.get_statistics(family="gaussian")["stat"])[0]
    return {"seconds": time.thread_time() - started, "statistic": statistic}


def changepoint_stream(x):
    """changepoint-online's Focus, one sample at a time; its statistic is half the square of ours."""
    from changepoint_online import Focus, Gaussian

    detector, samples = Focus(Gaussian()), x.tolist()
    statistic = np.empty(len(samples))
    started = time.thread_time()
    for i, value in enumerate(samples):
        detector.update(value)
        statistic[i] = detector.statistic()
    return {"seconds": time.thread_time() - started, "statistic": 2 * statistic}
