"""Make ``assets/sprites.png`` from the emoji pictures of a package (Noto emoji, Apache-2.0).

``npm pack emoji-datasource-google@16.0.0``, unpack it, then
``python tools/make_sprites.py package assets``: 64 emoji of 32 x 32 pixels, 8 a row, with their
names in ``assets/sprites.json`` in reading order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from PIL import Image

NAMES = (
    "apple banana grapes watermelon lemon strawberry cherries pineapple carrot corn mushroom pizza "
    "hamburger egg cake cookie dog cat mouse rabbit bear panda frog pig cow lion tiger monkey "
    "chicken penguin fish octopus turtle snail bee butterfly crab cactus sunflower tulip car bus "
    "airplane rocket boat house tent key hammer book bell umbrella moon star cloud snowflake fire "
    "guitar balloon crown camera chair anchor ghost"
).split()
ALIASES = {"panda": "panda_face", "lion": "lion_face", "monkey": "monkey_face"}
SIZE, COLUMNS = 32, 8


def main() -> None:
    """Run the program."""
    package, assets = Path(sys.argv[1]), Path(sys.argv[2])
    entries = json.loads((package / "emoji.json").read_text())
    files = {entry["short_name"]: entry["image"] for entry in entries}
    sheet = Image.new("RGBA", (COLUMNS * SIZE, len(NAMES) // COLUMNS * SIZE))
    for index, name in enumerate(NAMES):
        path = package / "img" / "google" / "64" / files[ALIASES.get(name, name)]
        sprite = Image.open(path).convert("RGBA").resize((SIZE, SIZE), Image.Resampling.LANCZOS)
        sheet.paste(sprite, (index % COLUMNS * SIZE, index // COLUMNS * SIZE))
    sheet.save(assets / "sprites.png", optimize=True)
    (assets / "sprites.json").write_text(json.dumps(NAMES) + "\n")


if __name__ == "__main__":
    main()
