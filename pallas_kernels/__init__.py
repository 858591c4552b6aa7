"""Kernels, one folder per operation; they know jax and nothing of the package."""
