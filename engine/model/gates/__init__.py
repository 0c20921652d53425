"""Retention gates, read off the hidden state, write gates, read off the keys, and gate files."""

from mmkv.engine.model.gates.files import (
    as_stored,
    foreign_note,
    gate_folder,
    gate_kind,
    load_gates,
    load_write_gates,
    save_gates,
    trained_age,
)
from mmkv.engine.model.gates.module import Gates, LayerGate, make_random_gates, tied_gates
from mmkv.engine.model.gates.write import WriteGates, make_random_write_gates, write_gates

__all__ = [
    "Gates",
    "LayerGate",
    "WriteGates",
    "as_stored",
    "foreign_note",
    "gate_folder",
    "gate_kind",
    "load_gates",
    "load_write_gates",
    "make_random_gates",
    "make_random_write_gates",
    "save_gates",
    "tied_gates",
    "trained_age",
    "write_gates",
]
