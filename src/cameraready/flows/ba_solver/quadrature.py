"""Nodes and weights of one step, and the settings of the solver.

References
----------
Chen, Li, Wang and Chen, 2026, arXiv:2601.21542.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

#: Offsets of the inner nodes that have names: (1 - 1/sqrt 5)/2 makes the rule exact to degree 5, 1/3 to degree 3.
LOBATTO = 0.5 * (1.0 - 5.0**-0.5)
NAMES = ("lobatto", "simpson38", "simpson", "trapezoid")


@dataclass(frozen=True)
class Quadrature:
    """A rule on [0, 1]: ``sum(weights * f(nodes))`` stands for the integral of f.

    Attributes
    ----------
    nodes, weights : tuple of float
        In increasing order of nodes.
    """

    nodes: tuple[float, ...]
    weights: tuple[float, ...]


def closed_rule(nodes: str | float) -> Quadrature:
    """The symmetric rule with both ends that is exact to the highest degree for its nodes.

    Parameters
    ----------
    nodes : {"lobatto", "simpson38", "simpson", "trapezoid"} or float
        A number is the offset a of the inner nodes a and 1 - a, strictly between 0 and 1/2; their weight is 1/(3(1 - s^2)) with
        s = 1 - 2a, that of the ends 1/2 less it. The names are a = (1 - 1/sqrt 5)/2 (exact to degree 5), a = 1/3 (degree 3), one inner
        node at 1/2 (degree 3), and none (degree 1).

    Raises
    ------
    ValueError
        An unknown name, or an offset out of range.
    """
    if nodes == "trapezoid":
        return Quadrature((0.0, 1.0), (0.5, 0.5))
    if nodes == "simpson":
        return Quadrature((0.0, 0.5, 1.0), (1 / 6, 2 / 3, 1 / 6))
    if isinstance(nodes, str):
        if nodes not in NAMES:
            raise ValueError(f"nodes={nodes!r} is none of {', '.join(NAMES)}, nor an offset between 0 and 1/2")
        offset = LOBATTO if nodes == "lobatto" else 1 / 3
    else:
        offset = float(nodes)
    if not 0.0 < offset < 0.5:
        raise ValueError(
            f"nodes={nodes!r}: the offset of the inner nodes must lie strictly between 0 and 1/2, for they are at a and 1 - a"
        )
    inner = 1.0 / (3.0 * (1.0 - (1.0 - 2.0 * offset) ** 2))
    return Quadrature((0.0, offset, 1.0 - offset, 1.0), (0.5 - inner, inner, inner, 0.5 - inner))


def open_rule(count: int) -> Quadrature:
    """Gauss-Legendre's rule with `count` nodes on [0, 1], exact to degree 2 count - 1."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return Quadrature(tuple((0.5 * (nodes + 1.0)).tolist()), tuple((0.5 * weights).tolist()))


@dataclass(frozen=True)
class BAConfig:
    """How the bi-anchor solver takes a step (Chen et al., 2026, arXiv:2601.21542).

    Parameters
    ----------
    nodes : {"lobatto", "simpson38", "simpson", "trapezoid"} or float
        Where in a step the integrand is predicted. A number is the offset a of two inner nodes at a and 1 - a. ``"trapezoid"`` has
        none. The paper finds hardly any difference among rules with inner nodes.
    anchors : {"both", "single"}
        ``"both"`` predicts from the start of the step and, once the network has been asked at its end, back from there. ``"single"``
        only predicts forward, at Gauss-Legendre nodes, and is of first order unless the SideNet is exact.
    gauss_nodes : int
        How many nodes ``anchors="single"`` has, 1 to 5.
    guidance : float
        Scale w of classifier-free guidance, v_u + w (v_c - v_u); 1 is the conditional velocity alone, at half the cost. Both halves go
        through network and SideNet and are combined afterwards.
    guidance_interval : (float, float)
        Guidance acts in steps whose noisier end lies in [low, high), times of this package: 0 noise, 1 data. Elsewhere the conditional
        velocity counts alone. The paper's interval for ImageNet, 0 < t <= 0.7 with t = 1 noise, is (0.3, 1).
    null_label : int, optional
        The label that stands for "no condition"; needed with guidance. Networks of this package have it at the number of classes.
    probe_chunk : int
        At most so many predictions (one for each node and half, over the whole batch) in one call of the SideNet; 0 makes all of a
        step's in one. Smaller takes less memory and gives the same samples.

    Raises
    ------
    ValueError
        A setting out of range; the sentence says which.
    """

    nodes: Literal["lobatto", "simpson38", "simpson", "trapezoid"] | float = "lobatto"
    anchors: Literal["both", "single"] = "both"
    gauss_nodes: int = 2
    guidance: float = 1.0
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    null_label: int | None = None
    probe_chunk: int = 0

    def __post_init__(self) -> None:
        closed_rule(self.nodes)
        if self.anchors not in ("both", "single"):
            raise ValueError(f"anchors={self.anchors!r} must be 'both' or 'single'")
        if not 1 <= self.gauss_nodes <= 5:
            raise ValueError(f"gauss_nodes={self.gauss_nodes} must be 1 to 5")
        low, high = self.guidance_interval
        if not 0.0 <= low < high <= 1.0:
            raise ValueError(
                f"guidance_interval={self.guidance_interval} must be two increasing times between 0 (noise) and 1 (data)"
            )
        if not np.isfinite(self.guidance):
            raise ValueError(f"guidance={self.guidance} must be a finite number")
        if self.guidance != 1.0 and self.null_label is None:
            raise ValueError(
                f"guidance={self.guidance} needs null_label, the label that the network was trained to take for no condition"
            )
        if self.probe_chunk < 0:
            raise ValueError(f"probe_chunk={self.probe_chunk} must be 0 (all at once) or more")

    @property
    def rule(self) -> Quadrature:
        """The quadrature of a step."""
        return open_rule(self.gauss_nodes) if self.anchors == "single" else closed_rule(self.nodes)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> BAConfig:
        """The settings that a saved scheduler holds as JSON values."""
        interval = settings.get("guidance_interval", (0.0, 1.0))
        return cls(**{**settings, "guidance_interval": tuple(interval)})
