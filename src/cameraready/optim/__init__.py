"""Optimisation: optimizers, differentiable solvers and private training for PyTorch.

You train with PyTorch and want more of the step itself: a layer that solves a quadratic program and can be trained through, an
optimizer that reaches the small losses of scientific problems, updates that neighbours in depth share, or training whose privacy can
be audited. The methods of this room drop into a training loop by one import.
"""
