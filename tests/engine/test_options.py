"""An option is a field: its type, default and text of the command line are said once."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field

import pytest

from mmkv.engine.options import declared, option


@dataclass
class Holder:
    name: str = option("A name.", MISSING)
    size: int | None = option(
        "A size.", "2k", kind=str | None, read=lambda text: int(text[0]) << 10
    )
    key: str = option("A secret.", "hidden", shown=False, name="api_key", flags=("--api-key",))
    many: list[str] = option("Several.", kind=list[str] | None, read=lambda given: given or [])
    other: dict[str, int] = field(default_factory=dict)  # no option


def test_options_are_read_from_the_fields() -> None:
    found = declared(Holder)
    assert [(name, made.field) for name, made in found.items()] == [
        ("name", "name"),
        ("size", "size"),
        ("api_key", "key"),
        ("many", "many"),
    ]
    kinds = {name: (made.type, made.optional) for name, made in found.items()}
    assert kinds == {
        "name": (str, False),
        "size": (str, True),
        "api_key": (str, False),
        "many": (list[str], True),
    }


def test_defaults_are_made_of_the_options_text() -> None:
    one, two = Holder("a"), Holder("a")
    assert one.size == 2048 and one.many == [] and one.many is not two.many
    assert Holder.key == "hidden" and "hidden" not in repr(one)
    with pytest.raises(TypeError, match="name"):
        Holder()  # type: ignore[call-arg]
