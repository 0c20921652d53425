"""``mmkv calibrate``: measure what a budget loses, and write the file that promises a bound on it.

Each dialogue is read twice, side by side: under the budget, and with all of its entries kept. The
promise is in :mod:`mmkv.calibration`. Heavy imports wait until the command runs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmkv.chat.options import ChatOptions
from mmkv.cli import arguments
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import BudgetError, ContextError, InputError
from mmkv.loading import Terminal, UsageError, load_engine, model_name

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.calibration import CalibratedAnswer, Calibration, Loss, Score
    from mmkv.training.data.examples import Examples

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

Row = dict[str, Any]
_FEW_RIGHT = 0.5


@app.command()
@arguments.engine_options()
@arguments.chat_options("min_pixels", "max_pixels", "quiet")
def calibrate(
    engine: EngineConfig,
    options: ChatOptions,
    data: Annotated[
        list[str],
        typer.Option(
            help="Dialogues like those to come: chat:FILE, llava:FILE or what else mmkv distill "
            "reads; scenes:dense for the bundled model. Repeatable."
        ),
    ],
    lost: Annotated[float, typer.Option(help="Share of the answers that may be lost.")] = 0.05,
    dialogues: Annotated[int, typer.Option(min=1, help="How many of them to read.")] = 100,
    loss: Annotated[
        str,
        typer.Option(
            help="What is lost: answers (right on the full cache and wrong here) or tokens (where "
            "another is the likeliest)."
        ),
    ] = "answers",
    score: Annotated[
        str | None,
        typer.Option(
            help="What a token is weighed by: doubt (of the model), risk, or both (their product; "
            "the default where there are retention gates)."
        ),
    ] = None,
    max_length: Annotated[int, typer.Option(min=16, help="Longest dialogue, in tokens.")] = 4096,
    media_root: Annotated[str | None, typer.Option(help="Folder of the files' media.")] = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw scores against losses: a PNG file.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The calibration; a killed run continues.")
    ] = Path("calibration.json"),
) -> None:
    """Measure what a budget loses, and promise that at most a share of the answers is lost."""
    from mmkv.calibration import LOSSES, SCORES, require_enough

    for name, given, known in (("loss", loss, LOSSES), ("score", score, SCORES)):
        if given is not None and given not in known:
            raise UsageError(f"--{name} is {given!r}; give {', '.join(known)}")
    require_enough(lost, dialogues)
    if figure is not None:
        _require_matplotlib()
    from mmkv.training.measure.record import require_output

    for file, option in ((output, "--output"), (figure, "--figure")):
        if file is not None:
            require_output(file.parent, option)
            if file.is_dir():
                raise UsageError(f"{file} is a folder; name a file in it with {option}")
    terminal, model = Terminal(options.quiet), model_name(engine)
    runtime = load_engine(
        replace(engine, model=model),
        terminal,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
    )
    if runtime.drafts is not None:
        raise UsageError("lossless sessions forget nothing; leave out --lossless")
    if not runtime.policy.evicts:
        raise UsageError(f"policy {runtime.policy.name} forgets nothing; give a --budget")
    from mmkv.training.data.examples import examples

    read = examples(
        model,
        data,
        dialogues,
        0,
        max_length=max_length,
        media_root=media_root,
        split="heldout",
        report=terminal.note,
    )
    rows = measured(runtime, read, dialogues, output, terminal)
    if score is None:
        score = "doubt" if rows[0]["answers"][0]["risk"] is None else "both"
    made = calibration(runtime, data, rows, lost, loss, score)  # type: ignore[arg-type]
    from mmkv.engine.paths import whole_file

    with whole_file(output) as draft:
        draft.write_text(made.model_dump_json())
    if figure is not None:
        draw(made, figure)
    print(described(made, rows, output))


def calibration(
    engine: Engine, data: Sequence[str], rows: Sequence[Row], lost: float, loss: Loss, score: Score
) -> Calibration:
    """Make a calibration of what :func:`measured` gave. Raises InputError: a score is not known."""
    from mmkv.calibration import FORMAT, CalibratedDialogue, Calibration, identity_of

    if score != "doubt" and any(one["risk"] is None for row in rows for one in row["answers"]):
        raise InputError(
            f"policy {engine.policy.name} has no retention gates that foresee a risk; give --score "
            "doubt"
        )
    return Calibration(
        format=FORMAT,
        identity=identity_of(engine),
        data=list(data),
        loss=loss,
        score=score,
        alpha=lost,
        dialogues=[
            CalibratedDialogue(answers=[answer_of(one, loss, score) for one in row["answers"]])
            for row in rows
        ],
    )


def answer_of(row: Mapping[str, Any], loss: Loss, score: Score) -> CalibratedAnswer:
    """Return an answer of :func:`ask` with one of its scores and losses."""
    from mmkv.calibration import CalibratedAnswer, score_of

    each = (score_of(score, row["risk"], doubt) for doubt in row["doubts"])
    highest = list(itertools.accumulate(each, max))  # up to each token
    if loss == "tokens":
        losses = [(highest[at], 1 / len(highest)) for at in row["differs"]]
    else:
        lost = row["right"] and row["wrong"] is not None
        losses = [(highest[row["wrong"]], 1.0)] if lost else []
    return CalibratedAnswer(score=highest[-1], losses=losses)


def described(made: Calibration, rows: Sequence[Row], output: Path) -> str:
    """Return what was found, for a terminal."""
    limit = "none" if math.isinf(made.limit) else f"{made.limit:.4g}"
    answers = sum(len(one.answers) for one in made.dialogues)
    right = sum(one["right"] for row in rows for one in row["answers"]) / answers
    lines = [
        f"promise   {made.promise}",
        f"budget    {made.identity['budget']}, policy {made.identity['policy']}",
        f"answers   {answers}, {right:.1%} of them right with all entries",
        f"lost      {made.lost():.2%} without the limit, {made.lost(made.limit):.2%} with it",
        f"escalated {made.escalated(made.limit):.2%} of the answers ({made.score} from {limit} on)",
        f"written   {output}; mmkv chat --calibration {output} --on-risk reread",
    ]
    if made.loss == "answers" and right < _FEW_RIGHT:
        lines.append(
            f"note      only {right:.0%} of the answers are right on the full cache, and no other "
            "can be lost; --loss tokens counts all"
        )
    return "\n".join(lines)


def measured(
    engine: Engine,
    read: Examples,
    count: int,
    output: Path,
    terminal: Terminal,
) -> list[Row]:
    """Read so many dialogues, each once; those of a run that was killed come from its journal.

    Raises:
        InputError: the data has fewer that can be read.
    """
    from rich.progress import track

    from mmkv.calibration import identity_of
    from mmkv.training.measure.record import Journal

    journal, engines = Journal(output.with_suffix(".runs.jsonl")), identity_of(engine)
    rows: list[Row] = []
    numbers = track(
        _numbers(read), "reading", count, console=terminal.console, disable=not terminal.animated
    )
    for number in numbers:
        where = _place(engines, read, number)
        known = journal.rows("where", where)
        found = known or journal.add([{"where": where, **ask(engine, read, number)}])
        row = found[0] | {"number": number}
        if row["answers"]:
            rows.append(row)
        if len(rows) == count:
            return rows
    raise InputError(
        f"the data has {len(rows)} dialogues with answers that could be read, and {count} are "
        "wanted; add --data, or lower --dialogues"
    )


def _place(engines: Mapping[str, str | int], read: Examples, number: int) -> str:
    """Return a digest of a dialogue as the model reads it, and of the engine: a file may change."""
    import torch

    digest = hashlib.sha256(json.dumps(engines).encode())
    made = read.encoder(read.mixture[number])
    for name, tensor in sorted(made[0].inputs().items()) if made else ():
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _numbers(read: Examples) -> Iterator[int]:
    """Yield the elements of a mixture up to the first that comes a second time."""
    number = 0
    while read.mixture.locate(number)[1] == 0:
        yield number
        number += 1


def ask(engine: Engine, read: Examples, number: int) -> Row:
    """Read one dialogue, its own answers in it.

    Returns:
        ``answers``, none where it cannot be read: the risk when the question has been read, the
        doubt of each token, the first token that was not the likeliest (``wrong``, or None),
        whether all were on the full cache (``right``), and the tokens for which another was the
        likeliest than there (``differs``).
    """
    import torch

    from mmkv.calibration import doubt_of
    from mmkv.engine.budget import Budget
    from mmkv.engine.prefill import extend_together
    from mmkv.training.measure.teacher_forced import spans

    answers: list[Row] = []
    made = read.encoder(read.mixture[number])
    inputs = made[0].inputs() if made else {"labels": torch.empty(1, 0)}
    labels = inputs.pop("labels")[0].tolist()
    where = spans(labels)
    if not where or where[0][0] == 0:  # left out, or a text, which answers nothing
        return {"answers": []}
    turn, done = engine.family.turn(inputs, 0, engine.device), 0
    with engine.session() as bounded, engine.session(Budget.fraction(1)) as whole:
        for start, stop in where:
            part = turn.part(done, start)
            doubts, best = list[float](), list[list[int]]()
            try:
                logits = extend_together([bounded, whole], [part, part])
                risk = bounded.risk()
                for token in labels[start:stop]:
                    doubts.append(doubt_of(logits[0]))
                    best.append(logits.argmax(-1).tolist())
                    logits = engine.decode([bounded, whole], [token, token])
            except (ContextError, BudgetError):  # the answers before it count
                break
            ours, full = (list(one) for one in zip(*best, strict=True))
            wrong = [at for at, token in enumerate(labels[start:stop]) if ours[at] != token]
            answers.append(
                {
                    "risk": None if risk is None else risk.total,
                    "doubts": doubts,
                    "wrong": wrong[0] if wrong else None,
                    "right": full == labels[start:stop],
                    "differs": [at for at, pair in enumerate(best) if pair[0] != pair[1]],
                }
            )
            done = stop
    return {"answers": answers}


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            "--figure needs matplotlib, which is not installed; pip install 'mmkv[calibrate]'"
        ) from error


def draw(made: Calibration, target: Path) -> None:
    """Draw the share that is lost, and that is escalated, for every limit; and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    scores = sorted({answer.score for one in made.dialogues for answer in one.answers})
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(scores, [made.lost(at) for at in scores], label="lost and not escalated")
    axes.plot(scores, [made.escalated(at) for at in scores], label="escalated")
    axes.axhline(made.alpha, color="grey", linestyle=":", label=f"promised: {made.alpha:g}")
    if math.isfinite(made.limit):
        axes.axvline(made.limit, color="black", linestyle="--", label=f"limit: {made.limit:.3g}")
    axes.set(xlabel=f"limit of the {made.score}", ylabel="share of the answers", ylim=(0, 1))
    axes.legend()
    figure.savefig(target, dpi=150)
    plt.close(figure)
