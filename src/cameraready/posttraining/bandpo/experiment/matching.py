"""Equal KL per update: each arm's setting is chosen on tuning seeds, by as many tries for every arm, so that a round moves as far as clip 0.2 does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def matched(multiples: Sequence[float], kl: Sequence[float], target: float) -> float:
    """The multiple whose KL per round is `target`, by interpolation of the tries on logarithms.

    Of several crossings the one nearest to 1 is taken; where none of the tries comes near, the nearest of them.

    Parameters
    ----------
    multiples : sequence of float
        Increasing.
    kl : sequence of float
        KL(old || new) of a round at each, nats.
    target : float
    """
    points = [(math.log(m), math.log(max(k, 1e-12))) for m, k in zip(multiples, kl, strict=True)]
    goal = math.log(target)
    crossings = []
    for (x, y), (x2, y2) in itertools.pairwise(points):
        if (y - goal) * (y2 - goal) <= 0 and y != y2:
            crossings.append(x + (x2 - x) * (goal - y) / (y2 - y))
    if crossings:
        return math.exp(min(crossings, key=abs))
    return math.exp(min(points, key=lambda point: abs(point[1] - goal))[0])
