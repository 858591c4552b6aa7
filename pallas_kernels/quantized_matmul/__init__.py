"""Rows times weights of 8 or 4 bits with scales."""
