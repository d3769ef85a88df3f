"""Sparse linear algebra for exact Gaussian processes: orderings, factors, iterative solvers."""
