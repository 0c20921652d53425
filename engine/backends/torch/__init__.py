"""Attention over ragged paged rows, and over the chunk being prefilled."""
