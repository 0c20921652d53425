"""Retention gates: how the score of an entry is read off the hidden state, and gate files."""

from engine.model.gates.files import as_stored, foreign_note, load_gates, save_gates
from engine.model.gates.module import Gates, LayerGate, make_random_gates, tied_gates

__all__ = [
    "Gates",
    "LayerGate",
    "as_stored",
    "foreign_note",
    "load_gates",
    "make_random_gates",
    "save_gates",
    "tied_gates",
]
