"""Finds, reads, converts and writes weights and tokenizers."""
