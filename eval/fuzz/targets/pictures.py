"""Picture files, their EXIF data, and data: URIs."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from random import Random

from PIL import Image

from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.target import Case, Target, as_bytes, as_text
from mmkv.prompt.media import load_image

_FORMATS = (
    ("PNG", "RGB"),
    ("PNG", "RGBA"),
    ("PNG", "P"),
    ("PNG", "I;16"),
    ("PNG", "1"),
    ("JPEG", "RGB"),
    ("JPEG", "CMYK"),
    ("GIF", "P"),
    ("BMP", "RGB"),
    ("TIFF", "RGB"),
    ("TIFF", "F"),
    ("WEBP", "RGB"),
    ("PPM", "RGB"),
    ("ICO", "RGB"),
    ("TGA", "RGB"),
)


class Pictures(Target):
    """Files of 15 kinds with changed bytes; whole files with EXIF data of any form."""

    name = "pictures"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        noise = Image.frombytes("L", (24, 17), Random(0).randbytes(24 * 17))
        exif = Image.Exif()
        exif[0x0112], exif[0x010F] = 6, "maker"
        self._files = []
        for kind, mode in _FORMATS:
            picture = noise.convert("I").convert(mode) if mode == "I;16" else noise.convert(mode)
            for options in ({}, {"exif": exif.tobytes()}):
                made = io.BytesIO()
                picture.save(made, kind, **options)
                self._files.append(made.getvalue())
        self._exif, self._noise = exif.tobytes(), noise.convert("RGB")

    def make(self, rng: Random) -> Case:
        kind = rng.randrange(4)
        if kind == 0:
            content = self._with_exif(mutate.flip(rng, self._exif, 8), rng)
        elif kind == 1:
            # Most of what a decoder believes stands in the first bytes.
            whole = rng.choice(self._files)
            content = mutate.flip(rng, whole[:80]) + whole[80:]
        else:
            content = mutate.flip(rng, rng.choice(self._files))
        return {"how": rng.choice(("file", "file", "uri", "object")), "content": as_text(content)}

    def _with_exif(self, exif: bytes, rng: Random) -> bytes:
        made = io.BytesIO()
        kind = rng.choice(("JPEG", "PNG", "WEBP"))
        try:
            self._noise.save(made, kind, exif=exif)
        except Exception:  # Pillow refuses to write this one
            return mutate.flip(rng, self._files[-1])
        return made.getvalue()

    def run(self, case: Case) -> None:
        content = as_bytes(case["content"])
        if case["how"] == "uri":
            made = load_image("data:image/png;base64," + base64.b64encode(content).decode())
        elif case["how"] == "object":
            try:
                opened = Image.open(io.BytesIO(content))
            except Exception:  # what a caller sees from Pillow itself
                return
            made = load_image(opened)
        else:
            file = self.folder / "picture"
            file.write_bytes(content)
            made = load_image(str(file))
        assert made.mode == "RGB" and made.width and made.height
