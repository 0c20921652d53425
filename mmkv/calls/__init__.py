"""Functions that a model may call: how they are named, written, constrained and read."""
