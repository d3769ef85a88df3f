"""What goes wrong in linear algebra."""

from __future__ import annotations


class IndefiniteMatrix(ValueError):
    """A matrix that should be positive definite is not, as far as floating point can tell."""


class NoConvergence(RuntimeError):
    """An iterative solver did not reach its tolerance."""
