"""Have dialogues of 50 pictures with ``mmkv serve``: what each turn reads, and how long it takes.

``python -m benchmarks.serving.long_dialogue`` asks about one more picture with each turn, once by
chat completions (the whole conversation is sent each time) and once by responses that go on from
the one before (the new turn alone is sent). A turn has to read its own tokens and no others, both
have to reply the same, and the time to the first token must not grow with the dialogue.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table
from benchmarks.serving.servers import (
    ServerProcess,
    mmkv_serve,
    picture_url,
    question,
    run_in_folder,
    words,
)

CHAT, RESPONSES = "chat completions", "responses"
EARLY = 5  # the turn that the last one is compared with


def _first_event(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Stream a reply; return its numbers, and the seconds to its first piece of text or its end."""
    text, first, usage, name, cut = "", None, None, None, False
    started = time.perf_counter()
    with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            raise BenchError(f"{path} answered {answer.status_code}: {answer.read()[:200]!r}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            choices = event.get("choices") or [{}]
            delta = event.get("delta") or ""
            piece = choices[0].get("delta", {}).get("content") if "choices" in event else delta
            done = event.get("response") or {}
            ended = choices[0].get("finish_reason") or done.get("usage")
            cut |= ended == "length" or done.get("status") == "incomplete"
            if piece or ended:
                first = first if first is not None else time.perf_counter() - started
                text += piece or ""
            usage = event.get("usage") or done.get("usage") or usage
            name = done.get("id") or name
    if usage is None or first is None:
        raise BenchError(f"{path} sent no usage")
    own = "prompt_tokens" in usage  # names of chat completions
    prompt, new = (
        usage[key]
        for key in (
            ("prompt_tokens", "completion_tokens") if own else ("input_tokens", "output_tokens")
        )
    )
    details = usage["prompt_tokens_details" if own else "input_tokens_details"]
    read = prompt - details["cached_tokens"]
    found = {"text": text, "first": first, "prompt": prompt, "new": new, "read": read}
    return found | {"cut": cut, "id": name}


def dialogue(server: ServerProcess, way: str, seed: int, turns: int, tokens: int) -> list[Any]:
    """Have one dialogue; a row per turn."""
    rng, messages, rows = Random(seed), [], []
    kept, before = 0, None  # tokens that the memory holds; the latest response
    with httpx.Client(base_url=server.url, timeout=600, trust_env=False) as client:
        for turn in range(turns):
            asked, picture = words(rng, 12), picture_url(1000 * seed + turn)
            before_cpu = server.cpu_seconds()
            messages.append(question(asked, picture))
            body: dict[str, Any] = {"model": "tiny-vlm", "temperature": 0, "stream": True}
            if way == CHAT:
                body |= {"messages": messages, "max_tokens": tokens}
                body["stream_options"] = {"include_usage": True}
                row = _first_event(client, "/v1/chat/completions", body)
            else:
                parts = [
                    {"type": "input_image", "image_url": picture},
                    {"type": "input_text", "text": asked},
                ]
                body |= {"input": [{"role": "user", "content": parts}], "max_output_tokens": tokens}
                body |= {"previous_response_id": before} if before else {}
                row = _first_event(client, "/v1/responses", body)
                before = row["id"]
            row["own"] = row["prompt"] - kept
            # The last token of a reply that was cut short is read with the next turn.
            kept = row["prompt"] + row["new"] - row["cut"]
            row["cpu"] = server.cpu_seconds() - before_cpu
            messages.append({"role": "assistant", "content": row["text"]})
            rows.append(row)
    return rows


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Have all dialogues, in turns of both ways."""
    options = ["--budget", str(args.budget), "--memory", "512MiB"]
    found: dict[str, list[Any]] = {CHAT: [], RESPONSES: []}
    with mmkv_serve(None, folder / "mmkv.log", *options) as server:
        for way in found:
            dialogue(server, way, 10**6, 2, args.tokens)
        for seed in range(args.rounds):
            for way, rows in found.items():
                rows.append(dialogue(server, way, seed, args.turns, args.tokens))
    page: dict[str, Any] = {}
    # The first turn of a dialogue may go on from the other way's, whose question is the same.
    for way, dialogues in found.items():
        firsts = [
            statistics.median(each[turn]["first"] for each in dialogues)
            for turn in range(args.turns)
        ]
        early = statistics.median(firsts[EARLY - 2 : EARLY + 1])
        late = statistics.median(firsts[-3:])
        rows = [row for each in dialogues for row in each[1:]]
        page[way] = {
            "turns_that_read_other_tokens": sum(row["read"] != row["own"] for row in rows),
            "turns": len(rows),
            "tokens_of_a_turn": statistics.median(row["own"] for row in rows),
            "tokens_of_the_dialogue": max(row["prompt"] for row in rows),
            f"first_token_s_turn_{EARLY}": early,
            f"first_token_s_turn_{args.turns}": late,
            "late_over_early": late / early,
            # The clock of the processor is coarse: means over ten turns of all dialogues.
            "cpu_s_turns_2_to_11": _mean_cpu(dialogues, slice(1, 11)),
            "cpu_s_last_10_turns": _mean_cpu(dialogues, slice(-10, None)),
            "first_token_s": firsts,
        }
    texts = [[[row["text"] for row in each] for each in found[way]] for way in found]
    page["replies_that_differ"] = sum(
        a != b for one, two in zip(*texts, strict=True) for a, b in zip(one, two, strict=True)
    )
    return page


def _mean_cpu(dialogues: list[list[Any]], turns: slice) -> float:
    return statistics.fmean(row["cpu"] for each in dialogues for row in each[turns])


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and write the result file; exit code 1 if a bar is missed."""
    parser = plain_parser("serving.long_dialogue", __doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=8, help="of each reply, at most")
    parser.add_argument("--budget", type=int, default=64, help="entries per row")
    parser.add_argument("--rounds", type=int, default=5, help="dialogues of each way")
    args = parser.parse_args(arguments)
    folder, found = run_in_folder(measure, args)
    if found is None:
        return 1
    shutil.rmtree(folder)
    keys = [key for key in found[CHAT] if key != "first_token_s"]
    rows = [[key, *(f"{found[way][key]:.4g}" for way in (CHAT, RESPONSES))] for key in keys]
    table(f"Dialogues of {args.turns} pictures", ["", CHAT, RESPONSES], rows)
    print(f"replies that differ between the two: {found['replies_that_differ']}")
    print(f"written to {save(args, 'serving-long-dialogue', found)}")
    more = sum(found[way]["turns_that_read_other_tokens"] for way in (CHAT, RESPONSES))
    return int(bool(more or found["replies_that_differ"]))


if __name__ == "__main__":
    sys.exit(main())
