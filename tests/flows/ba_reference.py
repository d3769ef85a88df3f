"""The bi-anchor solver a second time, in the paper's own direction of time and without any of the package's structure.

Written from the algorithm as the paper's code runs it: t = 1 is noise, t = 0 data, steps go down, a SideNet returns an increment for time t - h.
"""

import torch


def paper_sampler(velocity, side, x, n, a, w, *, guidance=1.0, y=None, null=None, interval=(0.0, 1.0)):
    """N uniform steps; `velocity(x, t, y)` and `side(x, v, t, h, y)` in the paper's convention, `t` and `h` numbers."""
    wo = 0.5 - w
    h = 1.0 / n

    def asked(x, t):
        given = velocity(x, t, y)
        return (given, velocity(x, t, null)) if guidance != 1.0 else (given,)

    def combined(halves, changes, t):
        values = [v + dv for v, dv in zip(halves, changes, strict=True)]
        if len(values) == 1:
            return values[0]
        scale = guidance if interval[0] < t <= interval[1] else 1.0
        return values[1] + scale * (values[0] - values[1])

    def probe(x, halves, t, step):
        labels = (y, null)[: len(halves)]
        return combined(halves, [side(x, v, t, step, each) for v, each in zip(halves, labels, strict=True)], t)

    def plain(halves, t):
        return combined(halves, [torch.zeros_like(x)] * len(halves), t)

    halves = asked(x, 1.0)
    for i in range(n):
        t = 1.0 - i * h
        v = plain(halves, t)
        va, vb, vc = (probe(x, halves, t, step) for step in (a * h, (1 - a) * h, h))
        predicted = x - h * (wo * v + w * va + w * vb + wo * vc)
        if i == n - 1:
            return predicted
        after = asked(predicted, t - h)
        back = probe(predicted, after, t - h, -a * h)
        x = x - h * (wo * v + w * va + w * back + wo * plain(after, t - h))
        halves = after
    raise AssertionError("a sampler takes at least one step")
