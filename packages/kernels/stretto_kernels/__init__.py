"""Loops compiled by numba for a processor: attention, products, norms and gates, on tensors of torch."""

__version__ = "0.1.0"
