"""What can go wrong with a quadratic program, and what a user should be warned of."""

from __future__ import annotations

from typing import Literal

Status = Literal["infeasible", "unbounded", "not solved", "not differentiable"]


class QPError(RuntimeError):
    """A quadratic program has no solution, none was found, or its solution has no derivative.

    Attributes
    ----------
    status : {"infeasible", "unbounded", "not solved", "not differentiable"}
        What is the matter, whatever words the solver used for it.
    """

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status

    def __reduce__(self) -> tuple[type[QPError], tuple[Status, str]]:
        return type(self), (self.status, str(self))


class QPWarning(UserWarning):
    """Base of the layer's warnings."""


class WeaklyActiveWarning(QPWarning):
    """A constraint holds with equality and multiplier zero: the solution has one-sided derivatives only."""


class InaccurateQPWarning(QPWarning):
    """A solution or a gradient is less accurate than it should be."""
