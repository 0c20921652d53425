"""Time ``mmkv serve`` beside ``transformers serve`` on the same checkpoint.

``python -m benchmarks.serving.speed`` starts both on the loopback, each with one thread for its
tensors, and has them answer dialogues of 10 turns, some at a time, in turns. A client sends the
whole conversation with each turn, as clients do. Every reply has the same number of tokens: the
checkpoint's end token is one that is never drawn. Counted are tokens per second of the clock and of
the server's own processor time, the time to the first piece of text, and the time between two.

Texts are read by the bundled model's text half, once with and once without transformers' continuous
batching. Pictures are read by a LLaVA of the bundled model's sizes with random weights, which
bfloat16 holds as it does those of published models (both servers compute in float32): to load the
bundled model itself transformers needs torchvision, which has no build for a CPU here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table
from benchmarks.bench.startup import write_text_model
from benchmarks.serving.servers import (
    ServerProcess,
    Streamed,
    mmkv_serve,
    picture_url,
    quantiles,
    question,
    run_in_folder,
    stream_chat,
    transformers_serve,
    words,
)
from mmkv.resources import bundled_model

OURS, THEIRS, BATCHED = "mmkv serve", "transformers serve", "transformers serve, batching"
NEVER = 642  # a token that these models do not draw, in place of the end of a reply
_QUESTION = 24  # words


@dataclass
class RequestBurst:
    """What came of some dialogues, one after the other or side by side."""

    seconds: float
    cpu: float
    tokens: int
    replies: list[Streamed] = field(repr=False)


def write_llava(
    folder: Path, side: int = 224, patch: int = 14, sizes: Mapping[str, int] | None = None
) -> Path:
    """Write a LLaVA of the bundled model's sizes with random weights: 256 tokens a picture.

    Args:
        side, patch: of a picture, pixels; sizes: of the text half, where it has others.

    Its file is float32, and bfloat16 holds its numbers, as it does those of published models.
    """
    import torch
    from transformers import (
        AutoTokenizer,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    source = bundled_model()
    given = json.loads((source / "config.json").read_text())
    text, vision = given["text_config"], given["vision_config"]
    names = "vocab_size hidden_size intermediate_size num_hidden_layers head_dim"
    names += " num_attention_heads num_key_value_heads max_position_embeddings"
    sizes = {name: text[name] for name in names.split()} | dict(sizes or {})
    tokenizer = AutoTokenizer.from_pretrained(source)
    template = (source / "chat_template.jinja").read_text()
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config={"model_type": "llama", **sizes, "bos_token_id": None, "eos_token_id": NEVER},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": vision["hidden_size"],
            "intermediate_size": vision["intermediate_size"],
            "num_hidden_layers": vision["depth"],
            "num_attention_heads": vision["num_heads"],
            "image_size": side,
            "patch_size": patch,
        },
        image_token_index=given["image_token_id"],
        image_seq_length=(side // patch) ** 2,
        eos_token_id=NEVER,
    )
    model = LlavaForConditionalGeneration(config).bfloat16().float()
    texts = tokenizer.batch_decode(
        [[token] for token in range(config.text_config.vocab_size)], True
    )
    silent = [token for token, text in enumerate(texts) if not (text.isascii() and text.strip())]
    model.lm_head.weight.data[[*silent, NEVER]] = 0  # another token is always likelier
    model.save_pretrained(folder)
    pictures = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        chat_template=template,
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    _rename_end(folder)
    return folder


def write_endless_text_model(folder: Path) -> Path:
    """Write the bundled model's text half, with an end token that is never drawn."""
    made = write_text_model(folder)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": NEVER}))
    _rename_end(made)
    return made


def _rename_end(folder: Path) -> None:
    """Have the tokenizer call a token the end that is never drawn."""
    from transformers import AutoTokenizer

    path = folder / "tokenizer_config.json"
    end = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(NEVER)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": end}))


async def dialogue(
    client: httpx.AsyncClient, name: str, seed: int, turns: int, new: int, pictures: bool
) -> list[Streamed]:
    """Have a dialogue: each turn sends all that was said before."""
    rng, messages, replies = Random(seed), [], []
    for turn in range(turns):
        picture = picture_url(1000 * seed + turn) if pictures else None
        messages.append(question(words(rng, _QUESTION), picture))
        body: dict[str, Any] = {"model": name, "messages": messages}
        body |= {"temperature": 0, "max_tokens": new}
        if not Path(name).is_absolute():  # transformers refuses it
            body["stream_options"] = {"include_usage": True}
        reply = await stream_chat(client, body)
        if reply.status != 200 or reply.error is not None:
            raise BenchError(f"{name} answered {reply.status}: {reply.error}")
        replies.append(reply)
        messages.append({"role": "assistant", "content": reply.text})
    return replies


async def burst(
    server: ServerProcess, name: str, seeds: Sequence[int], turns: int, new: int, pictures: bool
) -> RequestBurst:
    """Have a dialogue per seed, all at a time."""
    limits = httpx.Limits(max_connections=None)
    options: dict[str, Any] = {"timeout": 600, "trust_env": False, "limits": limits}
    async with httpx.AsyncClient(base_url=server.url, **options) as client:
        before, started = server.cpu_seconds(), time.perf_counter()
        found = await asyncio.gather(
            *(dialogue(client, name, seed, turns, new, pictures) for seed in seeds)
        )
        seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - before
    replies = [reply for one in found for reply in one]
    for reply in replies:
        counted = (reply.usage or {}).get("completion_tokens", new)
        if counted != new or reply.finish_reason not in ("length", None):
            ended = f"{counted} tokens, {reply.finish_reason}: {reply.text[:80]!r}"
            raise BenchError(f"a reply of {name} is not {new} tokens long ({ended})")
    return RequestBurst(seconds, cpu, new * len(replies), replies)


def summary(bursts: Sequence[RequestBurst]) -> dict[str, Any]:
    """Return the figures of one server with so many dialogues at a time."""
    replies = [reply for one in bursts for reply in one.replies]
    rounds = [one.tokens / one.seconds for one in bursts]
    return {
        "tokens_per_second": {"median": statistics.median(rounds), "rounds": rounds},
        "tokens_per_cpu_second": statistics.median(one.tokens / one.cpu for one in bursts),
        "first_token_s": quantiles([one.first for one in replies if one.first is not None]),
        "inter_token_s": quantiles([gap for one in replies for gap in one.gaps]),
        "replies": len(replies),
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time all servers on both kinds of dialogues, in turns."""
    found: dict[str, Any] = {}
    for kind in args.kinds:
        pictures = kind == "pictures"
        write = write_llava if pictures else write_endless_text_model
        model = str(write(folder / kind))
        options = ["--budget", str(args.budget), "--memory", "128MiB", "--policy", "streamingllm"]
        servers = {
            OURS: mmkv_serve(model, folder / f"{kind}-mmkv.log", *options),
            THEIRS: transformers_serve(model, folder / f"{kind}-transformers.log"),
        }
        names = {OURS: Path(model).name, THEIRS: model, BATCHED: model}
        try:
            if not pictures:
                log = folder / f"{kind}-batching.log"
                servers[BATCHED] = transformers_serve(model, log, "--continuous-batching")
            found[kind] = _rounds(args, servers, names, pictures)
        finally:
            for server in servers.values():
                server.close()
        save(args, "serving-speed-cpu", found)
    return found


def _rounds(
    args: argparse.Namespace,
    servers: dict[str, ServerProcess],
    names: dict[str, str],
    pictures: bool,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seed = 0
    for name, server in servers.items():  # nothing is timed before its first reply
        asyncio.run(burst(server, names[name], [10**6], 1, args.tokens, pictures))
    for count in args.dialogues:
        bursts: dict[str, list[RequestBurst]] = {name: [] for name in servers}
        for _ in range(args.rounds):
            seeds, seed = range(seed, seed + count), seed + count
            for name, server in servers.items():
                run = burst(server, names[name], seeds, args.turns, args.tokens, pictures)
                made = asyncio.run(run)
                bursts[name].append(made)
                print(f"{count} x {name}: {made.tokens / made.seconds:.1f} tokens/s", flush=True)
        page = {name: summary(each) for name, each in bursts.items()}
        for name in servers:
            ratios = [
                theirs.seconds / ours.seconds
                for ours, theirs in zip(bursts[OURS], bursts[name], strict=True)
            ]
            cpu = page[OURS]["tokens_per_cpu_second"] / page[name]["tokens_per_cpu_second"]
            page[name] |= {"ours_over_it": statistics.median(ratios), "ours_over_it_cpu": cpu}
        found[str(count)] = page
    return found


def show(found: dict[str, Any]) -> None:
    """Print the tables."""
    columns = ["dialogues, server", "tokens/s", "per CPU s", "first, p50 ms", "p99"]
    columns += ["next, p50 ms", "p99", "mmkv / it", "by CPU"]
    for kind, counts in found.items():
        rows = [
            [
                f"{count}, {name}",
                f"{page['tokens_per_second']['median']:.1f}",
                f"{page['tokens_per_cpu_second']:.1f}",
                *(
                    f"{1e3 * page[what][q]:.1f}"
                    for what in ("first_token_s", "inter_token_s")
                    for q in ("p50", "p99")
                ),
                f"{page['ours_over_it']:.1f}",
                f"{page['ours_over_it_cpu']:.1f}",
            ]
            for count, pages in counts.items()
            for name, page in pages.items()
        ]
        table(f"Dialogues about {kind}", columns, rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the tables and write the result file; return the exit code."""
    parser = plain_parser("serving.speed", __doc__)
    kinds = ["texts", "pictures"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--dialogues", nargs="+", type=int, default=[1, 4, 8], help="at a time")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32, help="of each reply")
    parser.add_argument("--budget", type=int, default=128, help="entries per row, of mmkv's cache")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    folder, found = run_in_folder(measure, args)
    if found is None:
        return 1
    shutil.rmtree(folder)
    show(found)
    print(f"written to {save(args, 'serving-speed-cpu', found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
