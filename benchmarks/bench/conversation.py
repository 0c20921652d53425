"""Time to the first token, late in a conversation: an agent's turn, and a camera's question.

``python -m benchmarks.bench.conversation`` lets two sessions of the bundled model under a budget
grow: an agent calls a tool in each turn and is told what came of it, and a camera shows a frame
every ten seconds and is asked something each minute. Copies are kept on the way. From copies of
these the same is done in turns, so that a slow moment of the machine meets all. Run in another
checkout, with ``--name``, it writes what ``--before`` shows beside.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench.harness import plain_parser, save, table, take_turns
from mmkv import Engine, Sampling, Session, bundled_model
from mmkv.eval.step import spread
from mmkv.training.data.scenes import object_names, tile

TURNS, MINUTES = (10, 30, 100, 300), (1, 10, 60, 600)
EVERY = 10  # seconds between frames
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
FEW = Sampling(max_new_tokens=48)


def turn(session: Session, number: int) -> float:
    """Have an agent make a step; return the seconds to the first token."""
    if session.last is None or not session.last.tool_calls:
        stream = session.send("Find the frog.", tools=[TOOL], tool_choice="required", sampling=FEW)
    else:
        said = f"Row {number % 9}: nothing. Go on, and look further to the left of what you saw."
        results = [(one, said) for one in session.last.tool_calls]
        stream = session.send_results(results, tool_choice="required", sampling=FEW)
    return _first(session, stream)


def ask(session: Session, number: int = 0) -> float:
    """Ask what the camera sees, after some frames of that number where it has one.

    Returns:
        the seconds to the first token.
    """
    for frame in range(number, number + 3) if number else ():
        observe(session, frame)
    return _first(session, session.send("What is it now?", sampling=Sampling(max_new_tokens=4)))


def _first(session: Session, stream: Any) -> float:
    for _ in stream:
        pass
    assert session.last is not None
    return session.last.seconds_to_first_token


def observe(session: Session, number: int) -> float:
    """Show a frame; return the seconds that it takes."""
    names, begin = object_names(), time.perf_counter()
    session.observe(tile(names[number % 7]), at=float(EVERY * number))
    return time.perf_counter() - begin


def agents(engine: Engine, turns: tuple[int, ...]) -> dict[str, Session]:
    """Return copies of an agent's session after so many turns."""
    session, kept = engine.session(), {}
    for number in range(1, max(turns) + 1):
        turn(session, number)
        if number in turns:
            kept[f"turn {number}"] = session.fork()
    return kept


def cameras(engine: Engine, minutes: tuple[int, ...]) -> dict[str, Session]:
    """Return copies of a camera's session after so many minutes."""
    session, kept = engine.session(), {}
    for number in range(1, max(minutes) * 60 // EVERY + 1):
        observe(session, number)
        if EVERY * number % 60 == 0:
            ask(session)
            if EVERY * number // 60 in minutes:
                kept[f"minute {EVERY * number // 60}"] = session.fork()
    return kept


def again(kept: Session, do: Callable[[Session, int], float]) -> float:
    """Do something in a copy, after the same untimed, so that it has messages of its own by then.

    An agent's reply that was cut off before its call was whole is made once more.
    """
    with kept.fork() as copy:
        copy.held.checkpoint = None
        for number in range(10**6, 10**6 + 9):
            do(copy, number)
            if do is not turn or (copy.last and copy.last.tool_calls):
                break
        return do(copy, 2 * 10**6)


def measured(kept: dict[str, Session], rounds: int, **steps: Any) -> dict[str, Any]:
    """Time steps from each of the kept sessions, in turns."""
    methods = {
        (name, step): lambda one=session, do=do: again(one, do)
        for name, session in kept.items()
        for step, do in steps.items()
    }
    times = take_turns(methods, rounds)  # type: ignore[arg-type]
    return {
        name: {"tokens": session.seen, "messages": len(session.history)}
        | {step: spread(times[name, step]) for step in steps}  # type: ignore[index]
        for name, session in kept.items()
    }


def main() -> None:
    """Measure, print a table and write the result file."""
    parser = plain_parser("bench.conversation", __doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--before", type=Path, help="result file of another checkout")
    parser.add_argument("--turns", type=int, nargs="+", default=TURNS)
    parser.add_argument("--minutes", type=int, nargs="+", default=MINUTES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = Engine.from_pretrained(
        bundled_model(), policy="dbtrimkv", budget=64, device="cpu", dtype="float32"
    )
    found = measured(agents(engine, tuple(args.turns)), args.rounds, first_token=turn)
    camera = cameras(engine, tuple(args.minutes))
    found |= measured(camera, args.rounds, first_token=ask, observe=observe)
    before = json.loads(args.before.read_text()) if args.before else {}
    rows = []
    for name, one in found.items():
        old = before.get("results", {}).get("now", {}).get(name, {})
        rows.append([name, f"{one['tokens']:,}"])
        for step in ("first_token", "observe"):
            for page in (old, one):
                rows[-1].append(f"{1e3 * page[step]['median']:.1f}" if step in page else "-")
    columns = [
        "after",
        "tokens",
        "first token, ms: before",
        "now",
        "observation, ms: before",
        "now",
    ]
    table("Late in a conversation", columns, rows)
    result = {"now": found, "before": {key: before[key] for key in before if key != "tables"}}
    args.before = args.before and args.before.name
    print(save(args, "conversation-cpu", result, {"conversation-cpu": [columns, *rows]}))


if __name__ == "__main__":
    main()
