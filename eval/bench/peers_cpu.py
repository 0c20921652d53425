"""Run one method of ``python -m eval.bench_peers_cpu`` in its own process.

``python -m eval.bench.peers_cpu JSON`` loads the model that the job names, prints
``{"ready": ...}`` and then obeys orders, one JSON object a line: hold prompts, read a prompt,
decode steps. So the memory of a process is that of one method, and a peer may need another
interpreter.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from mmkv.eval.bench.child import answering, memory, timed
from mmkv.eval.bench.cpu_methods import METHODS
from mmkv.eval.bench.cpu_methods.base import Job, Method

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def obey(method: Method, order: dict[str, Any]) -> dict[str, Any]:
    """Do what one line asks for.

    ``{"hold": prompts}`` and then ``{"decode": steps}``, or ``{"read": prompt}``.
    """
    if "hold" in order:
        method.use(method.job.preparing)
        method.hold(order["hold"])
        method.use(method.job.threads)
        return {"logits": method.logits()}
    if "read" in order:
        method.forget(1)
        took, _ = timed(lambda: method.read(order["read"]))
        return {**took, "logits": method.logits()}
    method.before()
    took, chosen = timed(lambda: method.decode(order["decode"]))
    method.after()
    return {**took, "tokens": [row[0] for row in chosen]}


def serve(job: Job, say: Callable[[dict[str, Any]], None]) -> None:
    """Load the model, then obey every line of stdin; every answer says the memory."""
    method = METHODS[job.method](job)
    say({"ready": True, "versions": method.about(), "memory": memory()})
    for line in sys.stdin:
        answer = obey(method, json.loads(line))
        say({**answer, "memory": memory()})


def main(arguments: list[str]) -> int:
    """Run one job."""
    return answering(lambda say: serve(Job(**json.loads(arguments[0])), say))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
