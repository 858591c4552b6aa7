"""Attention over a paged KV cache; `api.paged_attention` is the entrance."""
