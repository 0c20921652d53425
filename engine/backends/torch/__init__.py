"""The torch backend: the reference for attention, steps, eviction and write gates."""
