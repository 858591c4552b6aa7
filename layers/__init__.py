"""Flax modules and pure functions: the forward of the models."""
