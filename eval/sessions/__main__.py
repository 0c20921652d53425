"""Measure long dialogues under one budget: sessions with updates, and an endless video.

``python -m eval.sessions MODEL --domain text|scenes --method ...`` runs dialogues over several
sessions in which facts are replaced (:mod:`mmkv.eval.sessions.tasks`); the newest value is right.
``--domain stream`` shows the bundled model a stream of clips with questions in between
(:mod:`mmkv.eval.sessions.stream`), under a bounded memory. Answers are teacher-forced with eviction
after each token, and right when every token is the most likely one. The program writes JSON, a
Markdown table and a figure. A killed run continues when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.eval.domains import maker
from mmkv.eval.quality.command import add_methods, add_options, comparison, finish, running
from mmkv.eval.quality.run import ComparisonRuns
from mmkv.eval.sessions import report as dialogue_report
from mmkv.eval.sessions import stream as dialogue_stream
from mmkv.eval.sessions import stream_report as dialogue_stream_report
from mmkv.eval.sessions.tasks import SIZES, Sessions


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m eval.sessions", description=__doc__)
    add_options(parser, "sessions")
    add_methods(parser, ("32", "64", "128", "256"))
    parser.add_argument("--domain", choices=[*SIZES, "stream"], default="scenes")
    for place, name in enumerate(("sessions", "things", "distractors")):
        usual = ", ".join(f"{domain} {sizes[place]}" for domain, sizes in SIZES.items())
        parser.add_argument(f"--{name}", type=int, help=f"default: {usual}")
    parser.add_argument("--limit", type=int, default=24, help="dialogues, or clips of each stream")
    parser.add_argument(
        "--full-clips", type=int, default=64, help="clips that the full cache runs over (stream)"
    )
    args = parser.parse_args(arguments)
    with running(args, "mmkv.eval.sessions") as (path, journal):
        if min(args.limit, args.full_clips) < 1:
            raise InputError("--limit and --full-clips are at least 1")
        if args.domain == "stream" and args.workers > 1:
            raise InputError("a stream is read in order by one process; leave out --workers")
        compared = comparison(args)
        names = [method.name for method in compared.methods]
        if args.domain == "stream":
            rows = dialogue_stream.run(compared, args.limit, args.full_clips, journal)
            found = dialogue_stream_report.summarise(rows, names, args.budgets)
            report: Any = dialogue_stream_report
        else:
            given = (args.sessions, args.things, args.distractors)
            sizes = [u if g is None else g for g, u in zip(given, SIZES[args.domain], strict=True)]
            kind = Sessions.parse(f"sessions:{args.domain}:{':'.join(map(str, sizes))}")
            make = maker(args.model, kind.name)
            assert make is not None
            with ComparisonRuns(compared, journal, args.workers) as runs:
                raw = runs.of(kind.name, args.limit)
            notes = [make(index).notes for index in range(args.limit)]
            found = dialogue_report.summarise(kind, raw, notes, names, args.budgets)
            report = dialogue_report
        finish(args, path, found, report)


if __name__ == "__main__":
    main()
