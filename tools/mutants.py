"""Put small bugs into the code, one at a time, and see which ones the tests find.

``python -m tools.mutants --seed 36 --count 150 --output benchmarks/results/mutants.json`` draws
mutants of the files in ROOMS, as mutmut's mutators make them (without those of strings), with two
more: a call whose result nobody reads is left out, and the condition of an ``if`` is turned round.
Each is written into a copy of the working tree, where the tests that reach its line run, the
quickest first. ``--again FILE`` runs the survivors of an earlier report once more, after tests were
added, with ``--tests`` by those alone.

A first run of the tests under coverage says which ones reach a line. Every run is a fork of a
process that has loaded what the tests import, but for this project. Needs mutmut and coverage
(``make mutants``).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# By room: the files that are changed, and the tests that stand for them.
ROOMS = {
    "policies": (
        ["engine/policies/*.py"],
        " ".join(
            f"tests/engine/policies/test_{name}.py"
            for name in "policies presets pruning scoring".split()
        ),
    ),
    "cache": (
        ["engine/cache/*.py"],
        "tests/engine/cache tests/engine/backends/test_attention.py tests/engine/test_sessions.py",
    ),
    "scheduler": (["mmkv/scheduler/*.py"], "tests/mmkv/scheduler"),
    "resume": (
        [
            f"mmkv/server/{name}.py"
            for name in "conversations store state sessions job prompts guard".split()
        ],
        "tests/mmkv/server/test_resume.py tests/mmkv/server/test_lasting.py "
        "tests/mmkv/server/test_http.py "
        "tests/mmkv/server/test_sessions.py tests/mmkv/server/test_responses.py",
    ),
    "statistics": (
        ["eval/measure/stats.py"],
        "tests/eval/measure",
    ),
    "mmdu": (
        [f"eval/mmdu/{name}.py" for name in "scores judge rubric".split()],
        "tests/eval/mmdu",
    ),
    "hf": (["mmkv/hf/*.py"], "tests/mmkv/hf"),
    "chat": (["mmkv/chat/*.py"], "tests/mmkv/chat"),
    "losses": (
        ["training/model.py", "training/capacity.py"],
        "tests/training/test_capacity.py tests/training/test_model.py",
    ),
}
OWN = {"engine", "mmkv", "training", "eval", "benchmarks", "tests", "tools", "conftest", "__main__"}
MARKS = "not triton and not drawn and not long"
MISSED = ("survived", "not reached")


@dataclass
class Mutant:
    """One bug: ``before`` becomes ``after`` in a function; ``same`` counts others that read alike.

    ``outcome`` is "found", "hangs" (found, too), "survived", "not reached" or "gone" (its code was
    changed since); ``first`` that of the first report, where it ran again; ``judged`` a person's
    word on a survivor: "equivalent" or "harmless", and why.
    """

    room: str
    file: str
    where: str
    kind: str
    before: str
    after: str
    same: int
    line: int
    outcome: str = ""
    first: str = ""
    tests: int = 0
    judged: str = ""
    lines: tuple[int, int] = field(default=(0, 0), repr=False)
    made: Callable[[], str] = field(default=str, repr=False)  # the text of the whole file

    @property
    def name(self) -> tuple[object, ...]:
        """Return what names it, also after lines have moved."""
        return self.file, self.where, self.kind, self.before, self.after, self.same


def mutants_of(room: str, path: str) -> list[Mutant]:
    """Make every mutant of a file, in the order of its text."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation import mutators as made

    def shorter_calls(node: cst.Call) -> Iterator[cst.Call]:
        for index, argument in enumerate(node.args):
            if argument.keyword is not None:
                yield node.with_changes(args=[*node.args[:index], *node.args[index + 1 :]])

    def no_call(node: cst.Expr) -> Iterator[cst.CSTNode]:
        if isinstance(node.value, cst.Call):
            yield cst.Pass()

    def turned(node: cst.If) -> Iterator[cst.CSTNode]:
        inside = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), inside))

    operators: list[tuple[type, Callable[[Any], Any]]] = [
        (cst.BaseNumber, made.operator_number),
        (cst.Name, made.operator_name),
        (cst.AugAssign, made.operator_augmented_assignment),
        (cst.UnaryOperation, made.operator_remove_unary_ops),
        (cst.Call, shorter_calls),
        (cst.Call, made.operator_symmetric_string_methods_swap),
        (cst.CSTNode, made.operator_keywords),
        (cst.CSTNode, made.operator_swap_op),
        (cst.Match, made.operator_match),
        (cst.IfExp, made.operator_if_exp),
        (cst.Expr, no_call),
        (cst.If, turned),
    ]
    # Types, messages and imports are no behaviour that a test should hold.
    passed = (cst.Annotation, cst.Decorator, cst.Raise, cst.Assert, cst.FormattedString)
    passed += (cst.Import, cst.ImportFrom)

    wrapper = MetadataWrapper(cst.parse_module((ROOT / path).read_text()), unsafe_skip_copy=True)
    module, found = wrapper.module, []
    seen: Counter[tuple[object, ...]] = Counter()

    class Visitor(cst.CSTVisitor):
        METADATA_DEPENDENCIES = (PositionProvider,)

        def __init__(self) -> None:
            super().__init__()
            self.stack: list[str] = []
            self.at = (1, 1)

        def text(self, node: cst.CSTNode) -> str:
            if isinstance(node, cst.If):
                return f"if {module.code_for_node(node.test)}"
            return " ".join(module.code_for_node(node).split())[:160]

        def on_visit(self, node: cst.CSTNode) -> bool:
            if isinstance(node, passed):
                return False
            if isinstance(node, cst.If) and "TYPE_CHECKING" in self.text(node):
                return False
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                self.stack.append(node.name.value)
            place = self.get_metadata(PositionProvider, node, None)
            if place is not None:
                end = node.test if isinstance(node, cst.If) else node
                last = self.get_metadata(PositionProvider, end, place).end.line
                self.at = place.start.line, last
            here = self.at
            for kind, operator in operators:
                if isinstance(node, kind):
                    for other in operator(node):
                        self.add(operator.__name__, node, other, here)
            return True

        def on_leave(self, node: cst.CSTNode) -> None:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                self.stack.pop()

        def add(
            self, kind: str, node: cst.CSTNode, other: cst.CSTNode, here: tuple[int, int]
        ) -> None:
            before, after = self.text(node), self.text(other)
            name = (".".join(self.stack), kind.removeprefix("operator_"), before, after)
            mutant = Mutant(room, path, *name, same=seen[name], line=here[0], lines=here)
            seen[name] += 1
            mutant.made = lambda: module.deep_replace(node, other).code
            found.append(mutant)

    wrapper.visit(Visitor())
    return found


def all_mutants(rooms: Sequence[str]) -> dict[str, list[Mutant]]:
    """Return every mutant, by room."""
    return {
        room: [
            mutant
            for pattern in ROOMS[room][0]
            for path in sorted(ROOT.glob(pattern))
            for mutant in mutants_of(room, str(path.relative_to(ROOT)))
        ]
        for room in rooms
    }


def draw(every: dict[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Draw mutants: from each room at least 12, the rest as the rooms have mutants."""
    total = sum(len(room) for room in every.values())
    rest = max(0, count - 12 * len(every))
    drawn = []
    for room, mutants in every.items():
        share = min(len(mutants), 12 + round(rest * len(mutants) / total))
        drawn += random.Random(f"{seed} {room}").sample(mutants, share)
    return drawn


def tests_of(room: str, instead: Sequence[str] | None) -> list[str]:
    """Return the test files and folders of a room, those that are there."""
    if instead:
        return list(instead)
    return [name for name in ROOMS[room][1].split() if (ROOT / name).exists()]


def copy_tree(target: Path) -> None:
    """Copy what git tracks or does not ignore, and the compiled C code."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    listed += [str(p.relative_to(ROOT)) for p in (ROOT / "engine").rglob("*.so")]
    for name in listed:
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def forked(tree: Path, log: Path, work: Callable[[], int], limit: float) -> int | None:
    """Run ``work`` in a fork whose packages come from ``tree``; None when it took too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        to = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(to, 1)
        os.dup2(to, 2)
        os.chdir(tree)
        sys.path[:] = [str(tree), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(tree)
        try:
            code = int(work())
        except BaseException as error:
            print(repr(error))
            code = 99
        sys.stdout.flush()
        os._exit(code)
    ends = time.monotonic() + limit
    try:
        while time.monotonic() < ends:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        try:
            os.killpg(child, signal.SIGKILL)  # the servers that its tests started, too
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def run_tests(
    tests: Sequence[str], more: Sequence[str] = (), plugins: Sequence[object] = ()
) -> int:
    """Run pytest in this process; return its exit code."""
    import pytest

    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", MARKS, "--durations=0"]
    return int(pytest.main([*quiet, *more, *tests], plugins=list(plugins)))


class Reach:
    """A pytest plugin that notes which tests pass, how long they take and what they reach."""

    def __init__(self, files: Sequence[str]) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, include=list(files))
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    def pytest_sessionstart(self) -> None:
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self.coverage.switch_context("between tests")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def write(self, path: Path, tree: Path) -> None:
        """Write what was noted as JSON."""
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            str(Path(file).relative_to(tree)): {
                line: [test for test in tests if "::" in test]
                for line, tests in data.contexts_by_lineno(file).items()
            }
            for file in data.measured_files()
        }
        seconds = {t: s for t, s in self.seconds.items() if t not in self.failed}
        page = {"seconds": seconds, "failed": sorted(self.failed), "lines": lines}
        page["modules"] = [name for name in sys.modules if name.split(".")[0] not in OWN]
        path.write_text(json.dumps(page))


def reach(room: str, tree: Path, folder: Path, instead: Sequence[str] | None) -> dict[str, Any]:
    """Run a room's tests once, on code without a bug, under coverage."""
    target = folder / f"reach-{room}{'-instead' if instead else ''}.json"
    if not target.exists():
        files = [str(tree / pattern) for pattern in ROOMS[room][0]]

        def work() -> int:
            plugin = Reach(files)
            code = run_tests(tests_of(room, instead), plugins=[plugin])
            plugin.write(target, tree)
            return code

        forked(tree, target.with_suffix(".log"), work, 3600)
    found: dict[str, Any] = json.loads(target.read_text())
    found["instead"] = bool(instead)
    for name in found["modules"]:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.freeze()
    return found


def choose(mutant: Mutant, reached: dict[str, Any], most: float) -> list[str]:
    """Return the tests that reach a mutant's lines, quick ones first, of ``most`` s in all.

    Lines that run as a module is imported are held by the tests that reach anything in it. Tests
    that were named in place of a room's run for each of its mutants.
    """
    lines = reached["lines"].get(mutant.file, {})
    first, last = mutant.lines
    tests = {test for line in range(first, last + 1) for test in lines.get(str(line), ())}
    if reached["instead"]:
        tests = set(reached["seconds"])
    elif not tests and mutant.where.split(".")[-1][:1].isupper() | (mutant.where == ""):
        tests = {test for named in lines.values() for test in named} or set(reached["seconds"])
    chosen, spent = [], 0.0
    seconds = reached["seconds"]
    for test in sorted(tests & seconds.keys(), key=lambda t: (seconds[t], t)):
        spent += seconds[test]
        if spent > most and chosen:
            break
        chosen.append(test)
    return chosen


def attempt(mutant: Mutant, tree: Path, folder: Path, reached: dict[str, Any], most: float) -> None:
    """Write a mutant, run its tests, and put the file back."""
    tests = choose(mutant, reached, most)
    mutant.tests = len(tests)
    if not tests:
        mutant.outcome = "not reached"
        return
    target = tree / mutant.file
    before = target.read_text()
    allowed = 30 + 3 * sum(reached["seconds"][test] for test in tests)
    target.write_text(mutant.made())
    for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
        stale.unlink()
    try:
        code = forked(tree, folder / "last.log", lambda: run_tests(tests, ["-x"]), allowed)
    finally:
        target.write_text(before)
        for stale in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            stale.unlink(missing_ok=True)
    mutant.outcome = "hangs" if code is None else "survived" if code == 0 else "found"


def counts(mutants: Sequence[Mutant]) -> list[dict[str, object]]:
    """Count mutants by room and in all.

    ``found_first`` is of the first report; ``matter`` leaves out those that a person judged and
    those whose code is gone.
    """
    rows: list[dict[str, object]] = []
    for room in [*dict.fromkeys(m.room for m in mutants), "all"]:
        some = [m for m in mutants if room in (m.room, "all")]
        row: dict[str, object] = {"room": room, "made": len(some)}
        row["found_first"] = sum((m.first or m.outcome) in ("found", "hangs") for m in some)
        row["found"] = sum(m.outcome in ("found", "hangs") for m in some)
        row["equivalent"] = sum(m.judged.startswith("equivalent") for m in some)
        row["harmless"] = sum(m.judged.startswith("harmless") for m in some)
        row["matter"] = sum(not m.judged and m.outcome != "gone" for m in some)
        rows.append(row)
    return rows


def reported(report: Path) -> list[Mutant]:
    """Read the mutants of a report."""
    return [Mutant(**row) for row in json.loads(report.read_text())["results"]["mutants"]]


def survivors(report: Path, every: dict[str, list[Mutant]]) -> list[Mutant]:
    """Return a report's mutants; those of the rooms of ``every`` as the code has them today."""
    now = {mutant.name: mutant for room in every.values() for mutant in room}
    old = reported(report)
    for one in old:
        one.first = one.first or one.outcome
        if one.name in now:
            one.lines, one.made = now[one.name].lines, now[one.name].made
            one.line = now[one.name].line
        elif one.outcome in MISSED and one.room in every:
            one.outcome = "gone"  # its code was changed since
    return old


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--count", type=int, default=150, help="mutants to draw")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--seconds", type=float, default=30, help="most tests of a mutant take")
    parser.add_argument("--again", type=Path, help="report whose survivors run again")
    parser.add_argument("--tests", nargs="+", help="test files in place of those of each room")
    parser.add_argument("--folder", type=Path, help="keeps the copy, logs and reach of the tests")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

    every = all_mutants(args.rooms)
    if args.again:
        mutants = survivors(args.again, every)
        todo = [m for m in mutants if m.outcome in MISSED and m.room in args.rooms]
    else:
        mutants = draw(every, args.count, args.seed)
        if args.output and args.output.exists():  # a run that was ended goes on
            done = {one.name: one for one in reported(args.output)}
            mutants = [done.get(m.name, m) for m in mutants]
        todo = [m for m in mutants if not m.outcome]

    import hypothesis  # noqa: F401
    import PIL.Image  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="mutants-"))
    tree = (folder / "tree").resolve()
    shutil.rmtree(tree, ignore_errors=True)
    copy_tree(tree)
    failed: list[str] = []
    reached: dict[str, dict[str, Any]] = {}
    for number, mutant in enumerate(todo, 1):
        if mutant.room not in reached:
            reached[mutant.room] = reach(mutant.room, tree, folder, args.tests)
        failed += [t for t in reached[mutant.room]["failed"] if t not in failed]
        started = time.monotonic()
        attempt(mutant, tree, folder, reached[mutant.room], args.seconds)
        took = time.monotonic() - started
        print(
            f"{number}/{len(todo)} {mutant.outcome}, {mutant.tests} tests, {took:.0f} s: "
            f"{mutant.file}:{mutant.line} {mutant.where} {mutant.before!r} -> {mutant.after!r}",
            flush=True,
        )
        if args.output:
            _write(args, folder, _results(mutants, failed, every))
    for row in counts(mutants):
        print(row)


def _write(args: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Write the report in a fork: mmkv must not be loaded where mutants are to be."""

    def work() -> int:
        from mmkv.training.measure.record import write_results

        settings = {"seed": args.seed, "count": args.count, "seconds": args.seconds}
        write_results(args.output.resolve(), settings, results)
        return 0

    if forked(ROOT, folder / "write.log", work, 120) != 0:
        raise SystemExit(f"the report cannot be written: {(folder / 'write.log').read_text()}")


def _results(
    mutants: Sequence[Mutant], failed: Sequence[str], every: dict[str, list[Mutant]]
) -> dict[str, Any]:
    done = [m for m in mutants if m.outcome]
    left_out = ("made", "lines")
    return {
        "counts": counts(done),
        "mutants_of_the_rooms": {room: len(found) for room, found in every.items()},
        "tests_left_out": list(failed),
        "mutants": [{k: v for k, v in asdict(m).items() if k not in left_out} for m in done],
    }


if __name__ == "__main__":
    main()
