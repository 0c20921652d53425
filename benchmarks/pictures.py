"""Draw the papers' pictures: ``python -m benchmarks.pictures NAME [MODEL] [--trace PAGE]``.

``retention``, ``sparsity``: what the gates predict, and what was evicted (TRIM-KV, arXiv
2512.03324, figures 4 and 5); ``density``: where kept tokens stand (G-KV, figure 7); ``survival``:
how long attention comes back to a token (DBTrimKV, arXiv 2605.09649, figures 2 and 9);
``overlap``: what one window of queries looks at, beside earlier windows (G-KV, figure 1);
``dynamics``: queries as a stable linear process (DBTrimKV, figure 8); ``bands``:
:mod:`benchmarks.bands`.

The first three are drawn from a page of ``mmkv explain`` (``--trace``) or of a held-out dialogue
read here under ``--budget``; the others need one pass of the model with full attention.
"""

from __future__ import annotations

import argparse
import base64
import math
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import InputError, MmkvError, one_line
from mmkv.engine.model.decoder import Decoder
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.explain.figures import require_matplotlib
from mmkv.explain.page import page_data
from mmkv.explain.trace import Trace
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.measure.teacher_forced import Documents, FullAttention, lay_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STILL_HELD = 65535  # of a page's lives
_DENSITY_POLICIES = ("dbtrimkv", "streamingllm", "snapkv", "rkv", "gkv")


# --- a recorded session ---


@dataclass(frozen=True)
class Traced:
    """What a page of ``mmkv explain`` tells; R rows (layer and KV head), T tokens.

    Attributes:
        rows: of the model's, those on the page; heads: KV heads of a layer.
        gone: int64 ``[R, T]``, tokens that had been seen when the entry was gone; T + 1 where it is
            still held, 0 where it was gone before the recording.
        log_beta: float32 ``[R, T]``, None without retention gates.
        modality: uint8 ``[T]``.
    """

    rows: list[int]
    heads: int
    gone: np.ndarray
    log_beta: np.ndarray | None
    modality: np.ndarray
    policy: str

    @property
    def tokens(self) -> int:
        """T."""
        return self.gone.shape[1]

    def held(self) -> np.ndarray:
        """Say which entries are held at the end, bool ``[R, T]``."""
        return self.gone > self.tokens


def read_trace(path: str | Path) -> Traced:
    """Read a page of ``mmkv explain``.

    Raises:
        InputError: it is no such page, or shows only the last tokens of a long conversation.
    """
    data = page_data(path)
    if data["first"]:
        raise InputError(f"{path} shows only the last tokens; record a shorter conversation")
    tokens, rows = len(data["texts"]), data["rows"]
    shape = (len(rows), tokens)
    life = _numbers(data["blobs"]["lives"]).reshape(shape).astype(np.int64)
    seen = np.asarray(data["seen"])
    born = np.searchsorted(seen, np.arange(tokens), side="right")
    gone = seen[np.clip(born[None] + life - 1, 0, len(seen) - 1)]
    gone = np.where(life == 0, 0, np.where(life == _STILL_HELD, tokens + 1, gone))
    beta = None
    if "beta" in data["blobs"]:
        coded = _numbers(data["blobs"]["beta"]).reshape(shape)
        beta = coded.astype(np.float32)
        if data["range"] is not None:
            low, high, levels = data["range"]
            size = low + beta * (high - low) / (max(levels, 2) - 1)
            beta = np.where(coded == 255, 0, -np.exp(size)).astype(np.float32)
    modality = np.frombuffer(data["modality"].encode(), np.uint8) - ord("0")
    return Traced(rows, data["heads"], gone, beta, modality, data["run"])


def _numbers(blob: Mapping[str, Any]) -> np.ndarray:
    raw = np.frombuffer(zlib.decompress(base64.b64decode(blob["base64"])), np.uint8)
    whole = np.ascontiguousarray(raw.reshape(blob["width"], -1).T)
    return whole.view(f"<{blob['kind']}").ravel()


def retention_matrix(log_beta: np.ndarray) -> np.ndarray:
    """Return ``beta_i ** (t - i)`` for t >= i, float ``[T, T]``; 0 above the diagonal."""
    tokens = len(log_beta)
    age = np.arange(tokens)[:, None] - np.arange(tokens)[None]
    return np.where(age >= 0, np.exp(np.maximum(age, 0) * log_beta[None]), 0.0)


def decision_matrix(gone: np.ndarray) -> np.ndarray:
    """Return alpha: whether entry i is held once token t has been read, bool ``[T, T]``."""
    after = np.arange(1, len(gone) + 1)[:, None]
    return (np.arange(len(gone))[None] < after) & (gone[None] > after)


def sparsity(log_beta: np.ndarray) -> np.ndarray:
    """Return ``1 - 2 / (T (T + 1)) sum of beta_i ** (t - i)`` over t >= i of each row, ``[R]``.

    TRIM-KV, section 5.1, where the sum leaves the diagonal out; with it a row that forgets nothing
    has 0.

    Args:
        log_beta: ``[R, T]``.
    """
    tokens = log_beta.shape[1]
    left = tokens - np.arange(tokens)  # terms of each entry
    x = log_beta.astype(np.float64)
    never = x > -1e-12
    safe = np.where(never, -1.0, x)
    sums = np.where(never, left, np.expm1(left * safe) / np.expm1(safe))
    return np.asarray(1 - 2 * sums.sum(1) / (tokens * (tokens + 1)))


def density(held: np.ndarray, bins: int = 20) -> tuple[np.ndarray, float]:
    """Return the density of kept positions over the text, ``[bins]``, and their mean.

    Args:
        held: bool ``[R, T]``. Positions are divided by T; a density of 1 everywhere is even.
    """
    tokens = held.shape[1]
    where = (np.nonzero(held)[1] + 0.5) / tokens
    return np.histogram(where, bins, (0, 1), density=True)[0], float(where.mean())


# --- one pass with full attention ---


@dataclass(frozen=True)
class Pass:
    """What one pass over a document of T tokens computes in L layers with entries.

    Attributes:
        attention: float32 ``[L, Hq, T, T]`` weights of queries (first) on keys.
        queries: float32 ``[L, T, Hq, D]``, after RoPE.
        states: float32 ``[N, T, d]`` after each of all N layers.
        modality: uint8 ``[T]``.
    """

    attention: np.ndarray
    queries: np.ndarray
    states: np.ndarray
    modality: np.ndarray


class _Watched(FullAttention):
    """Full attention that notes its weights and queries."""

    def __init__(self, engine: Runtime, documents: Documents) -> None:
        super().__init__(engine, documents)
        self.weights: list[Tensor] = []
        self.queries: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group = query.shape[1] // key.shape[1]
        wide = key.float().repeat_interleave(group, 1)
        logits = torch.einsum("thd,shd->hts", query.float(), wide) * self.scale
        later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1).to(logits.device)
        self.weights.append(logits.masked_fill(later, -math.inf).softmax(-1))
        self.queries.append(query.float().clone())
        return super().attend(layer, query, key, value)


@torch.no_grad()
def look(engine: Runtime, inputs: Mapping[str, Any]) -> Pass:
    """Read one document with full attention, and note what the pictures need.

    Args:
        inputs: of one document, as the processor returns them; memory grows with its square.
    """
    documents = lay_out(engine, [inputs])
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    step, states = _Watched(engine, documents), []
    rope, hidden = engine.rope.at(documents.positions), documents.hidden
    for index in range(engine.spec.num_layers):
        x = decoder.gate_input(index, hidden)
        hidden = decoder.layer(index, hidden, x, rope, step, documents.deepstack)
        states.append(hidden.float())
    return Pass(
        torch.stack(step.weights).cpu().numpy(),
        torch.stack(step.queries).cpu().numpy(),
        torch.stack(states).cpu().numpy(),
        documents.modality.cpu().numpy(),
    )


def last_selected(attention: np.ndarray, top: int | None, mass: float = 0.0) -> np.ndarray:
    """Return the last query that selected each token, int64 ``[..., T]``.

    A query selects the ``top`` tokens of most weight; with None the smallest set whose weights
    reach ``mass``. A token selects itself at its birth.

    Args:
        attention: ``[..., T, T]``, queries first.
    """
    tokens = attention.shape[-1]
    order = np.argsort(-attention, -1, kind="stable")
    ranked = np.take_along_axis(attention, order, -1)
    if top is not None:
        chosen = np.broadcast_to(np.arange(tokens) < top, ranked.shape)
    else:
        chosen = ranked.cumsum(-1) - ranked < mass
    selected = np.zeros(attention.shape, bool)
    np.put_along_axis(selected, order, chosen & (ranked > 0), -1)
    query = np.arange(tokens)[:, None]
    return np.maximum(np.where(selected, query, -1).max(-2), np.arange(tokens))


def survival(
    last: np.ndarray, horizons: Sequence[int] | np.ndarray, among: np.ndarray
) -> np.ndarray:
    """Return the share of tokens that some query at least L later selects, per horizon L.

    Of the tokens ``among`` (bool ``[T]``) those count that have a query so late; NaN without one.

    Args:
        last: ``[..., T]`` as :func:`last_selected` returns it; all before T is averaged.
    """
    birth = np.arange(last.shape[-1])
    shares = []
    for horizon in horizons:
        possible = among & (birth + horizon < last.shape[-1])
        later: np.ndarray = last - birth
        alive = (later[..., possible] >= horizon).astype(float)
        shares.append(float(alive.mean()) if alive.size else math.nan)
    return np.asarray(shares)


def window_scores(attention: np.ndarray, windows: int, size: int) -> np.ndarray:
    """Return the mean weight that the last ``windows`` windows of queries pay to all before them.

    Args:
        attention: ``[..., T, T]``.

    Returns:
        ``[windows, ..., P]``, oldest window first; P = T - windows * size.

    Raises:
        InputError: the document is too short.
    """
    tokens = attention.shape[-1]
    first = tokens - windows * size
    if first < 1:
        raise InputError(f"{windows} windows of {size} do not fit in {tokens} tokens; give fewer")
    starts = range(first, tokens, size)
    return np.stack([attention[..., s : s + size, :first].mean(-2) for s in starts])


def overlap(scores: np.ndarray, share: float) -> np.ndarray:
    """Return how much of what the last window looks at, others look at too.

    Each window's set is the ``share`` of tokens with the highest scores.

    Args:
        scores: ``[W, ..., P]``.

    Returns:
        ``[W, ...]``: the overlap with each earlier window, and last with the union of them all.
    """
    count = max(1, round(share * scores.shape[-1]))
    sets = np.zeros(scores.shape, bool)
    np.put_along_axis(sets, np.argsort(-scores, -1, kind="stable")[..., :count], True, -1)
    others = np.concatenate([sets[:-1], sets[:-1].any(0, keepdims=True)])
    return np.asarray((others & sets[-1]).sum(-1) / count)


@dataclass(frozen=True)
class Var:
    """A fit of ``r_{t+1} = A r_t + b + noise``.

    Attributes:
        a: ``[n, n]``; b: ``[n]``; eigenvalues: complex ``[n]`` of A.
        explained: share of the variance of held-out next steps.
    """

    a: np.ndarray
    b: np.ndarray
    eigenvalues: np.ndarray
    explained: float

    @property
    def radius(self) -> float:
        """Spectral radius of A; below 1 the process goes back to its mean."""
        return float(np.abs(self.eigenvalues).max())


def principal(series: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Project series ``[T, D]`` onto the first ``count`` principal directions of them all."""
    pooled = np.concatenate(series)
    mean = pooled.mean(0)
    axes = np.linalg.svd(pooled - mean, full_matrices=False)[2][:count]
    return [(one - mean) @ axes.T for one in series]


def fit_var(train: Sequence[np.ndarray], test: Sequence[np.ndarray]) -> Var:
    """Fit by least squares on the steps of ``train``, each ``[T, n]``; judge on ``test``."""
    before = np.concatenate([one[:-1] for one in train])
    after = np.concatenate([one[1:] for one in train])
    design = np.concatenate([before, np.ones((len(before), 1))], 1)
    solution = np.linalg.lstsq(design, after, rcond=None)[0]
    a, b = solution[:-1].T, solution[-1]
    real = np.concatenate([one[1:] for one in test])
    missed = real - np.concatenate([one[:-1] for one in test]) @ a.T - b
    explained = 1 - float((missed**2).sum() / ((real - real.mean(0)) ** 2).sum())
    return Var(a, b, np.linalg.eigvals(a), explained)


# --- drawing ---


def record(model: str, data: str, policy: str, budget: str, seed: int) -> Traced:
    """Read one held-out dialogue under a budget, token by token after the first, and record it."""
    engine = Runtime.from_pretrained(
        model, policy=policy, budget=Budget.parse(budget), prefill_chunk=16, device="cpu"
    )
    inputs = _inputs(model, data, seed)
    with engine.session() as session, tempfile.TemporaryDirectory() as folder:
        trace = Trace(session)
        session.prefill(inputs)
        return read_trace(trace.report(Path(folder) / "page.html"))


def _inputs(model: str, data: str, seed: int) -> dict[str, Any]:
    example = examples(model, [data], seed + 1, 0, split="heldout")[seed]
    return {name: value for name, value in example.items() if name not in ("labels", "cuts")}


def _traced(args: argparse.Namespace) -> Traced:
    if args.trace is not None:
        return read_trace(args.trace)
    return record(args.model, args.data, args.policy, args.budget, args.seed)


def _look(args: argparse.Namespace, seed: int | None = None) -> Pass:
    engine = Runtime.from_pretrained(args.model, policy="full", device="cpu")
    return look(engine, _inputs(args.model, args.data, args.seed if seed is None else seed))


def _betas(traced: Traced) -> np.ndarray:
    if traced.log_beta is None:
        raise InputError(f"the trace is of {traced.policy}; retention needs a policy with gates")
    return traced.log_beta


def _draw_retention(figure: Figure, args: argparse.Namespace) -> str:
    traced = _traced(args)
    betas = _betas(traced)
    # Rows from the one that forgets most to the one that forgets least.
    order = np.argsort(-sparsity(betas))
    shown = order[np.linspace(0, len(order) - 1, min(6, len(order))).round().astype(int)]
    panels = figure.subplots(2, len(shown), squeeze=False)
    for column, row in enumerate(shown.tolist()):
        layer, head = divmod(traced.rows[row], traced.heads)
        drawn = (retention_matrix(betas[row]), decision_matrix(traced.gone[row]))
        for panel, values in zip(panels[:, column], drawn, strict=True):
            panel.imshow(values, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            panel.set(xticks=[], yticks=[])
        panels[0, column].set_title(f"layer {layer}, head {head}", fontsize=8)
    panels[0, 0].set_ylabel("retention $\\beta_i^{t-i}$", fontsize=8)
    panels[1, 0].set_ylabel("held $\\alpha_{ti}$", fontsize=8)
    return f"{traced.policy}; query t downwards, entry i to the right"


def _draw_sparsity(figure: Figure, args: argparse.Namespace) -> str:
    traced = _traced(args)
    layers = max(traced.rows) // traced.heads + 1
    values = np.full(layers * traced.heads, np.nan)
    values[traced.rows] = sparsity(_betas(traced))
    panel = figure.subplots()
    image = panel.imshow(values.reshape(layers, -1).T, cmap="magma", vmax=1, aspect="auto")
    panel.set(xlabel="layer", ylabel="KV head")
    panel.set_xticks(range(layers))
    panel.set_yticks(range(traced.heads))
    figure.colorbar(image, ax=panel)
    return f"sparsity of learned retention, {traced.tokens} tokens"


def _draw_density(figure: Figure, args: argparse.Namespace) -> str:
    panel, bins = figure.subplots(), 20
    if args.trace is not None:
        drawn = [read_trace(args.trace)]
        names = [drawn[0].policy]
    else:
        names = list(args.policies)
        drawn = [record(args.model, args.data, name, args.budget, args.seed) for name in names]
    for name, traced in zip(names, drawn, strict=True):
        values, mean = density(traced.held(), bins)
        (line,) = panel.step((np.arange(bins) + 0.5) / bins, values, where="mid", label=name)
        panel.axvline(mean, color=line.get_color(), linestyle=":", linewidth=1)
    panel.set(xlabel="position in the text", ylabel="density of kept entries", xlim=(0, 1))
    panel.legend(fontsize=7)
    return f"dotted: mean position; {drawn[0].tokens} tokens"


def _draw_survival(figure: Figure, args: argparse.Namespace) -> str:
    seen = _look(args)
    tokens = seen.attention.shape[-1]
    horizons = np.unique(np.geomspace(1, tokens - 1, 24).astype(int))
    curves, heads = figure.subplots(1, 2, width_ratios=(3, 2))
    last = last_selected(seen.attention, args.top)
    mass = last_selected(seen.attention, None, 0.95)
    for kind, name in enumerate(MODALITIES):
        among = seen.modality == kind
        if among.any():
            for found, style, label in ((last, "-", f"top {args.top}"), (mass, ":", "95 % mass")):
                shares = survival(found, horizons, among)
                curves.plot(horizons, shares, style, color=f"C{kind}", label=f"{name}, {label}")
    curves.set(xscale="log", ylim=(0, 1), xlabel="horizon L in tokens", ylabel="still looked at")
    curves.legend(fontsize=7)
    everything = np.ones(tokens, bool)
    at = tokens // 4
    by_head = [[survival(head, [at], everything)[0] for head in layer] for layer in last]
    image = heads.imshow(np.transpose(by_head), cmap="magma", vmin=0, vmax=1, aspect="auto")
    heads.set(xlabel="layer", ylabel="query head", title=f"L = {at}")
    figure.colorbar(image, ax=heads)
    return f"full attention, {tokens} tokens"


def _draw_overlap(figure: Figure, args: argparse.Namespace) -> str:
    seen = _look(args)
    size = max(1, min(128, seen.attention.shape[-1] // 8))
    scores = window_scores(seen.attention, 4, size)
    shares = np.linspace(0.05, 0.95, 19)
    values = np.stack([overlap(scores, share).mean((1, 2)) for share in shares])
    panel = figure.subplots()
    for index, line in enumerate(values.T):
        union = index == values.shape[1] - 1
        label = "union of the earlier" if union else f"window {index + 1} of 4"
        panel.plot(shares, line, "r-" if union else "o-", markersize=3, label=label)
    panel.set(xlabel="share of tokens kept", ylabel="overlap with the last window", ylim=(0, 1.02))
    panel.legend(fontsize=7)
    return f"windows of {size} queries, mean over heads"


def _draw_dynamics(figure: Figure, args: argparse.Namespace) -> str:
    passes = [_look(args, seed) for seed in range(args.seed, args.seed + args.dialogues)]
    layers, _, heads = passes[0].queries.shape[:3]
    layer = min(2, layers - 1) if args.layer is None else args.layer
    if not (0 <= layer < layers and 0 <= args.head < heads):
        raise InputError(
            f"no layer {layer}, head {args.head}; the model has {layers} layers of {heads} heads"
        )
    series = principal([one.queries[layer, :, args.head].astype(float) for one in passes], 8)
    cut = max(1, 3 * len(series) // 4)
    fit = fit_var(series[:cut], series[cut:] or series[:cut])
    plane, means = figure.subplots(1, 2)
    circle = np.exp(2j * np.pi * np.linspace(0, 1, 200))
    plane.plot(circle.real, circle.imag, color="0.6", linewidth=1)
    plane.plot(fit.eigenvalues.real, fit.eigenvalues.imag, "o", markersize=4)
    plane.set(aspect="equal", xlabel="real", ylabel="imaginary", title="eigenvalues of A")
    for one in series:
        running = one[:, 0].cumsum() / np.arange(1, len(one) + 1)
        means.plot(running, linewidth=1)
    means.set(xlabel="token", title="running mean of the first component")
    return (
        f"layer {layer}, head {args.head}, {len(series)} dialogues: spectral radius "
        f"{fit.radius:.2f}, of held-out steps {fit.explained:.0%} explained"
    )


def _draw_bands(figure: Figure, args: argparse.Namespace) -> str:
    from benchmarks.bands import draw, measure

    found = measure(args.model, args.data, args.dialogues)
    draw(figure, found)
    return found.says()


PICTURES: dict[str, Callable[[Figure, argparse.Namespace], str]] = {
    "retention": _draw_retention,
    "sparsity": _draw_sparsity,
    "density": _draw_density,
    "survival": _draw_survival,
    "overlap": _draw_overlap,
    "dynamics": _draw_dynamics,
    "bands": _draw_bands,
}
_SIZES = {"retention": (10, 3.6), "survival": (9, 3.4), "dynamics": (9, 3.6), "bands": (8, 3.4)}


def draw(name: str, args: argparse.Namespace, path: Path) -> str:
    """Draw one picture into a file; return what it says in words."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZES.get(name, (5.6, 3.4)), layout="constrained")
    says = PICTURES[name](figure, args)
    figure.suptitle(says, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    return says


_FORMATS = (".png", ".webp", ".svg", ".pdf")


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.add_argument("name", choices=PICTURES)
    made.add_argument("model", nargs="?", default=str(bundled_model()))
    made.add_argument("--trace", type=Path, help="page of mmkv explain, for the first three")
    made.add_argument("--data", default="scenes:sparse", help="as of mmkv distill --data")
    made.add_argument("--policy", default="dbtrimkv")
    made.add_argument("--policies", nargs="+", default=_DENSITY_POLICIES, help="of density")
    made.add_argument("--budget", default="12.5%", help="entries a head, or a share")
    made.add_argument("--seed", type=int, default=4, help="which held-out dialogue")
    made.add_argument("--dialogues", type=int, default=8, help="of dynamics and bands")
    made.add_argument("--layer", type=int, help="of dynamics; default: the third")
    made.add_argument("--head", type=int, default=0, help="query head, of dynamics")
    made.add_argument("--top", type=int, default=16, help="tokens that a query selects: survival")
    made.add_argument("--output", type=Path, help="PNG, WebP, SVG or PDF; NAME.png without")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw one picture, and return the exit code."""
    args = parser().parse_args(arguments)
    try:
        if args.trace is not None and args.name not in ("retention", "sparsity", "density"):
            raise InputError(f"{args.name} needs a pass of the model; leave --trace out")
        for name in ("top", "dialogues"):
            if (given := getattr(args, name)) < 1:
                raise InputError(f"--{name} is {given}; give 1 or more")
        output = args.output or Path(f"{args.name}.png")
        if output.suffix.lower() not in _FORMATS:
            raise InputError(f"--output {output} ends with none of {', '.join(_FORMATS)}")
        print(draw(args.name, args, output))
    except MmkvError as error:
        print(f"benchmarks.pictures: error: {one_line(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
