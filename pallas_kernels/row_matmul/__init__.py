"""Rows times a weight stored (out, in); `api.row_matmul` is the entrance."""
