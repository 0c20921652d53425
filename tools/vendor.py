"""Fetch the libraries of the pages from npm: ``python -m tools.vendor``.

``mmkv/web/vendor.json`` pins a version of each package and its integrity, and names the files that
are wanted. They are written as they were published, with the package's licence, and their SHA-256
goes into the list. To take a newer version, change it in the list with the integrity that ``npm
view PACKAGE@VERSION dist.integrity`` tells.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "mmkv" / "web" / "vendor.json"


def folder_of(package: dict[str, Any]) -> Path:
    """Return where the files of a package lie."""
    return ROOT / package.get("folder", "mmkv/web/vendor")


def fetch(package: dict[str, Any], within: Path) -> Path:
    """Return a package as npm has it, an archive. Raises SystemExit: it is not the pinned one."""
    name = f"{package['package']}@{package['version']}"
    command = ["npm", "pack", name, "--silent", "--pack-destination", str(within)]
    subprocess.run(command, cwd=within, check=True, stdout=subprocess.DEVNULL)
    (archive,) = within.glob("*.tgz")
    kind, _, wanted = package["integrity"].partition("-")
    found = base64.b64encode(hashlib.new(kind, archive.read_bytes()).digest()).decode()
    if found != wanted:
        sys.exit(f"{name} has the integrity {kind}-{found}, not the pinned one; nothing is written")
    return archive


def write(package: dict[str, Any], archive: Path) -> None:
    """Write the wanted files of a package's archive, and note their SHA-256."""
    folder = folder_of(package)
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as file:
        for name, about in package["files"].items():
            member = file.extractfile(f"package/{about['from']}")
            assert member is not None
            content = member.read()
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            about["sha256"] = hashlib.sha256(content).hexdigest()


def main() -> None:
    """Fetch, compare and write all packages of the list; the list says what was written."""
    packages = json.loads(LIST.read_text())
    for package in packages:
        with tempfile.TemporaryDirectory() as folder:
            write(package, fetch(package, Path(folder)))
    LIST.write_text(json.dumps(packages, indent=2) + "\n")
    sizes = [path.stat().st_size for path in LIST.with_suffix("").rglob("*") if path.is_file()]
    print(f"{sum(sizes):,} bytes in {LIST.with_suffix('').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
