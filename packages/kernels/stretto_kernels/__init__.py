"""Kernels on torch's tensors: loops compiled by numba for a CPU, and Triton kernels for a GPU."""

__version__ = "0.1.0"
