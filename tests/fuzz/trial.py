"""One input of a fuzz test: what it may lead to, and what it may not.

mmkv does as it is asked, or refuses in a line of its own words. Any other exception, a hang, pages
that nobody holds and a file that was changed are failures.
"""

from __future__ import annotations

import linecache
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, settings

import mmkv
from mmkv.engine.errors import MmkvError
from mmkv.engine.runtime import Runtime

# Of processor time; by the clock three times as much, as others use the machine, too.
HANG_SECONDS = 10.0
_OWN = f"{Path(mmkv.__file__).parent}/"
_PROGRAMS = (f"{_OWN}eval/", f"{_OWN}training/")


def examples(count: int) -> settings:
    """Draw so many inputs: always the same ones, but for the profile ``long``.

    No deadline, as machines are busy: :func:`trial` ends what hangs. No explaining, which traces
    every line, as the tests of Ctrl-C do.
    """
    long = settings.get_current_profile_name() == "long"
    return settings(
        max_examples=count * (settings().max_examples if long else 100) // 100,
        derandomize=not long,
        database=settings().database if long else None,
        deadline=None,
        phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


class Wrong(AssertionError):
    """mmkv took an input that it must refuse, or answered wrongly."""


class Hang(BaseException):
    """An input took longer than it may; no Exception, so that nobody mends it on its way."""


class Trial:
    """What comes of an input.

    Attributes:
        engines: whose pages are all free afterwards.
        refusal: the error in mmkv's own words.
    """

    def __init__(self, engines: Iterable[Runtime]) -> None:
        self.engines = list(engines)
        self.refusal: BaseException | None = None


@contextmanager
def trial(*engines: Runtime) -> Iterator[Trial]:
    """Run an input in the block.

    Args:
        engines: whose pages are all free afterwards.

    Raises:
        Wrong: it hung, pages are held, a file was changed, or what it raised is no Exception.
        Exception: what it raised, unless that is a refusal.
    """
    made = Trial(engines)
    try:
        with _limited_time(), _only_own_files():
            yield made
    except BaseException as error:
        if not refused(error):
            if isinstance(error, (Exception, KeyboardInterrupt)):
                raise
            raise Wrong(f"{type(error).__name__}: {error}") from error
        made.refusal = error
        traceback.clear_frames(error.__traceback__)
    for engine in made.engines:
        check_pages(engine)
    for files in _files:
        files.check()


def refused(error: BaseException) -> bool:
    """Whether an error is mmkv's own, or a TypeError or ValueError that its code raises."""
    text = str(error)
    if isinstance(error, MmkvError):
        return bool(text.strip())
    if not isinstance(error, (TypeError, ValueError)) or "\n" in text:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = last.filename.startswith(_OWN) and not last.filename.startswith(_PROGRAMS)
    return own and linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise ")


def check_pages(engine: Runtime) -> None:
    """Raise Wrong unless every page is free, now that no session is open."""
    with engine.lock:  # what nobody refers to any more comes back
        pool = engine.cache.pool
    if held := pool.num_pages - pool.free_pages:
        raise Wrong(f"{held} pages are held")
    engine.cache.check()


@contextmanager
def _limited_time() -> Iterator[None]:
    late: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        late.append(number)
        raise Hang("over the time limit")

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, 1), (signal.SIGALRM, signal.ITIMER_REAL, 3))
    before = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, share in timers:
        signal.setitimer(timer, share * HANG_SECONDS)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        if late and not isinstance(sys.exc_info()[1], Hang):
            raise Hang("over the time limit, which was caught on its way")


@contextmanager
def limited_memory(size: int) -> Iterator[None]:
    """Let this process address ``size`` bytes more than now."""
    try:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        taken = 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# An input may hold any path, and tests may run as root: what mmkv does when it is asked to save to
# /etc/passwd is to be seen, not to be suffered.


class Files:
    """Files in the home and in the working folder that no input may change."""

    def __init__(self, root: Path) -> None:
        self.home, self.here = root / "home", root / "here"
        self._kept = [
            folder / name
            for folder in (self.home, self.here)
            for name in ("notes.txt", "picture.png", "config.json", "gates.json", "x")
        ]
        for path in self._kept:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("keep me")

    def check(self) -> None:
        """Raise Wrong where one was changed; it is put back."""
        changed = []
        for path in self._kept:
            with suppress(OSError):
                if not path.is_symlink() and path.read_bytes() == b"keep me":
                    continue
            changed.append(path.name)
            if path.is_dir() or path.is_symlink():
                path.rename(path.with_name(f"{path.name}-moved"))
            path.write_text("keep me")
        if changed:
            raise Wrong(f"changed: {', '.join(changed)}")


_files: list[Files] = []


@contextmanager
def guarded(files: Files) -> Iterator[None]:
    """Have :func:`trial` look at these files after each input."""
    _files.append(files)
    try:
        yield
    finally:
        _files.remove(files)


_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python's audit hooks that change the file system, and how many paths they begin with.
_CHANGES = dict.fromkeys(
    "os.chmod os.chown os.mkdir os.remove os.rmdir os.truncate os.utime".split(), 1
) | dict.fromkeys("os.link os.rename os.symlink".split(), 2)
_watching: list[bool] = []


@contextmanager
def _only_own_files() -> Iterator[None]:
    """Refuse changes of files outside the folder for temporary files.

    A hook stays for as long as its process, so it is put in place once. It does not see native code
    that opens files by itself.
    """
    if not _watching:
        sys.addaudithook(_refuse_changes)
    _watching[:] = [True]
    try:
        yield
    finally:
        _watching[:] = [False]


def _refuse_changes(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching[0]:
        return
    if event == "open":
        path, _, flags = arguments
        changed: Iterable[Any] = [path] if isinstance(flags, int) and flags & _WRITES else []
    else:
        changed = arguments[: _CHANGES.get(event, 0)]
    for path in changed:
        if isinstance(path, (str, bytes, os.PathLike)) and not _inside(path):
            raise PermissionError(13, "outside the folders of this run", os.fsdecode(path))


def _inside(path: str | bytes | os.PathLike[str]) -> bool:
    try:
        real = os.path.realpath(os.fsdecode(path))
    except ValueError:  # a NUL byte: the system refuses it, too
        return True
    roots = (os.path.realpath(tempfile.gettempdir()), "/dev", "/proc/self")
    return any(real == root or real.startswith(f"{root}/") for root in roots)
