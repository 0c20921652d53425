"""Watch a camera for minutes in a memory of a third of a megabyte, and ask what it saw.

Run: python examples/endless.py [--minutes 18] [--speed 20] [--svg FILE]
Shows a live line, and answers beside the truth; the last line counts what was right.
Needs: a checkout of mmkv (the scenes are drawn).

The camera sees a drawn scene, a frame a second; it changes every five seconds, and every two
minutes one is numbered. Beside the session under learned retention gates stands one of the same
budget that keeps the newest entries. Questions go to copies of both, so neither reads an answer.
"""

import argparse
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

import mmkv
from mmkv.training.data.dialogues import IGNORE, caption, cell_question, grid
from mmkv.training.data.scenes import Scene, render
from mmkv.turn import compose

HOLD, NOTED, LARGEST = 5, 120, 3  # seconds of a scene, between numbered ones; cells a side
SIMILAR = 2.0  # grey levels up to which a frame counts as the one before
UNSURE = 0.8  # probability of an answer below which it is called a guess


@dataclass(frozen=True)
class SeenScene:
    """A scene of the stream, seen from second ``at``; ``number``: how questions call it."""

    at: int
    scene: Scene
    number: int | None


@dataclass(frozen=True)
class StreamQuestion:
    """A question and the true answer; ``kind`` says what time it is about."""

    kind: str
    text: str
    answer: str


def stream(seed: str, minutes: int) -> list[SeenScene]:
    """Draw the scenes of a stream; at most nine are numbered, as the model knows numbers."""
    rng = random.Random(f"watch-{seed}")
    every = max(NOTED, -(-minutes * 60 // 9 // HOLD) * HOLD)
    made = []
    for at in range(0, minutes * 60, HOLD):
        noted = at % every == 0
        scene = grid(rng, "heldout", LARGEST, least=4 if noted else 1)
        made.append(SeenScene(at, scene, 1 + at // every if noted else None))
    return made


def about(shown: SeenScene, kind: str, rng: random.Random, count: int) -> list[StreamQuestion]:
    """Ask for things in ``count`` cells of a numbered picture."""
    assert shown.number is not None
    asked = (
        cell_question(shown.number, item.cell, item.name)
        for item in rng.sample(shown.scene.items, count)
    )
    return [StreamQuestion(kind, one.text, one.answer) for one in asked]


class Watcher:
    """A session that observes every scene once; copies of it are asked."""

    def __init__(self, engine: mmkv.Engine) -> None:
        self.session = engine.session()

    def show(self, shown: SeenScene) -> None:
        """See a scene in every second that it lasts."""
        self.session.observe(IGNORE if shown.number is None else caption(shown.number))
        for _ in range(HOLD):
            self.session.observe(render(shown.scene), skip_similar=SIMILAR)

    @torch.inference_mode()
    def ask(self, text: str) -> tuple[str, float]:
        """Answer greedily; return the answer and its probability, all tokens together."""
        ids, sure = list[int](), 1.0
        with self.session.fork() as copy:
            logits = copy.prefill(compose(copy, [{"type": "text", "text": text}]).inputs)
            while len(ids) < 12:
                chances = logits.softmax(-1)
                token = int(chances.argmax())
                sure *= float(chances[token])
                if token in copy.engine.eos_token_ids:
                    break
                ids.append(token)
                logits = copy.decode(token)
        return self.session.engine.processor.tokenizer.decode(ids).strip(), sure


def asked_at(seen: list[SeenScene], last: bool) -> list[StreamQuestion]:
    """Ask about now whenever a picture is numbered; at the end also about the past."""
    now, noted = seen[-1].at, [one for one in seen if one.number is not None]
    rng = random.Random(now)
    found = [("now" if noted[-1].at == now else "the latest", noted[-1])]
    if not last and noted[-1].at != now:
        return []
    if last or len(noted) % 3 == 0:
        past = min(noted, key=lambda one: abs(now - one.at - 600))
        if now >= 590:
            found.append((f"{(now - past.at + 30) // 60} minutes ago", past))
        if len(noted) > 1:
            found.append(("the beginning", noted[0]))
    return [question for when, one in found for question in about(one, when, rng, 2 if last else 1)]


def clock(seconds: int) -> str:
    """Write a time of the stream."""
    return f"{seconds // 60:2d}:{seconds % 60:02d}"


def judged(said: str, sure: float, question: StreamQuestion) -> tuple[str, str]:
    """Return what was said and whether it is true, and a colour."""
    right = said == question.answer
    guess = f" (guess, {sure:.0%} sure)" if sure < UNSURE else ""
    return f"{said or '-'}{guess} {'✓' if right else '✗'}", "green" if right else "red"


def status(way: Watcher, seconds: int, context: int) -> Text:
    """Write the live line."""
    session = way.session
    memory = session.memory()
    full = session.seen * session.engine.spec.rows * 2 * session.engine.spec.head_dim * 4
    frames, times = session.frames_seen, session.seen * session.engine.spec.rows / memory.entries
    return Text(
        f"{clock(seconds)}  {frames.kept:,} scenes read, {frames.skipped:,} near-duplicates skipped"
        f" · {session.seen:,} tokens, {times:.0f} x the memory, {session.seen / context:.2f} x the "
        f"context\n{memory.kv_bytes / 1e6:.2f} MB held; all of it would be {full / 1e6:.1f}",
        style="bold cyan",
    )


def watch(
    drawn: list[SeenScene], ways: dict[str, Watcher], console: Console, speed: float, context: int
) -> str:
    """Show a stream to all sessions, ask them on the way, and return how many were right."""
    right, guesses, count = dict.fromkeys(ways, 0), list[bool](), 0
    started = time.perf_counter()
    with Live(console=console, refresh_per_second=8) as live:
        for number, shown in enumerate(drawn, 1):
            for way in ways.values():
                way.show(shown)
            live.update(status(ways["mmkv"], shown.at + HOLD, context))
            for question in asked_at(drawn[:number], number == len(drawn)):
                line = Text(f"{clock(shown.at)} {question.kind:>15}: {question.text} ")
                for name, way in ways.items():
                    said, sure = way.ask(question.text)
                    text, colour = judged(said, sure, question)
                    line.append(f"\n      {name:>6} ", style="dim").append(text, style=colour)
                    right[name] += said == question.answer
                    if name == "mmkv" and said != question.answer:
                        guesses.append(sure < UNSURE)
                count += 1
                live.console.print(line)
            if speed:
                behind = (shown.at + HOLD) / speed - (time.perf_counter() - started)
                time.sleep(max(0.0, behind))
    return (
        f"Right: mmkv {right['mmkv']} of {count}, window {right['window']} of {count}. Of mmkv's "
        f"{len(guesses)} wrong answers {sum(guesses)} were called a guess."
    )


def main() -> None:
    """Watch, ask, and count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=int, default=18, help="of the stream")
    parser.add_argument("--speed", type=float, default=20, help="times as fast; 0: no waiting")
    parser.add_argument("--seed", default="demo")
    parser.add_argument("--budget", type=float, default=64)
    parser.add_argument("--svg", help="write a picture of the terminal there")
    args = parser.parse_args()
    if args.minutes < 1 or args.budget < 1:
        parser.error("--minutes and --budget are at least 1")
    if args.svg and not Path(args.svg).absolute().parent.is_dir():
        parser.error(f"no folder for {args.svg}; make it first")
    console = Console(record=args.svg is not None, width=118 if args.svg else None)
    model = mmkv.bundled_model()
    loaded = {
        name: mmkv.Engine.from_pretrained(
            model, policy=policy, budget=args.budget, device="cpu", dtype="float32"
        )
        for name, policy in (("mmkv", "dbtrimkv"), ("window", "streamingllm"))
    }
    ways = {name: Watcher(engine) for name, engine in loaded.items()}
    context = loaded["mmkv"].spec.max_position
    console.print(
        f"A camera, {args.minutes} minutes of it"
        f"{f', {args.speed:g} times as fast' if args.speed else ''}. Both memories: "
        f"{args.budget:g} entries a head.\nmmkv keeps what learned gates score highest; the window "
        "keeps the newest. ✓ and ✗: beside what was drawn.\n"
    )
    found = watch(stream(args.seed, args.minutes), ways, console, args.speed, context)
    console.print(f"\n{found}")
    if args.svg:
        drawn_svg = console.export_svg(title="make demo-endless")
        # Without the fonts that it would load from another site.
        Path(args.svg).write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn_svg, flags=re.DOTALL))
    for way in ways.values():
        way.session.close()


if __name__ == "__main__":
    main()
