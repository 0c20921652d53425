"""Choose EpiKV's layers for a model: ``python -m benchmarks.bands [MODEL] [--data SOURCE]``.

EpiKV (arXiv 2606.26472) scores a token by how much the residual stream changes there at layers
where that goes with its importance, against layers where it goes the other way (section 3.2). Both
bands follow from labels by occlusion (section 3.4, appendix C): a window of tokens is replaced by
padding, and its tokens are important where the answer is then another. The study of the paper is of
one model; this repeats it for any.

The answer is regenerated greedily in the paper, and what it concludes is compared. Here it is fed,
in one pass, and counts as the same where each of its tokens is the most likely one: another wording
is another answer, so give dialogues whose answers are short.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.pictures import look
from mmkv.engine.errors import InputError, MmkvError, one_line
from mmkv.engine.runtime import Runtime
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.data.examples import examples
from mmkv.training.measure.teacher_forced import Documents, full_attention_states, lay_out, spans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WINDOW, STRIDE = 32, 16  # appendix C
ROLLING = 64  # section 3.2


@dataclass(frozen=True)
class Bands:
    """Spearman's rho of each layer with the labels.

    Attributes:
        rho: float ``[N]``, by layer; of the rolling mean of the change of the states after it.
        labels: int8 ``[T]`` of one dialogue, 1 important, 0 not, -1 not tested; for the picture.
        important: share of tested tokens; dialogues: how many were answered right.
    """

    rho: np.ndarray
    labels: np.ndarray
    important: float
    dialogues: int

    def bands(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Return the first and last layer of band A (positive) and band B (negative).

        Each is the run of neighbouring layers with the largest sum among those of at least half the
        strongest; None where no layer has that sign.
        """
        found = []
        for values in (self.rho, -self.rho):
            strong = np.where(values >= np.nanmax(values) / 2, values, 0)
            found.append(best_run(strong))
        return found[0], found[1]

    def says(self) -> str:
        """Return the result in one line, with the policy to give."""
        positive, negative = self.bands()
        said = f"{self.dialogues} dialogues, {self.important:.0%} of tested tokens important"
        if positive is None or negative is None:
            return f"{said}; all layers have the same sign: no two bands"
        a, b = ((first + last) // 2 for first, last in (positive, negative))
        count = len(self.rho)
        return (
            f"{said}; band A layers {positive[0]}-{positive[1]}, band B {negative[0]}-"
            f"{negative[1]}: epikv:a={a / count:g},b={b / count:g}"
        )


def best_run(values: np.ndarray) -> tuple[int, int] | None:
    """Return first and last index of the run of positive values with the largest sum."""
    best, found, start = 0.0, None, 0
    for index in range(len(values) + 1):
        if index == len(values) or not values[index] > 0:
            if values[start:index].sum() > best:
                best, found = float(values[start:index].sum()), (start, index - 1)
            start = index + 1
    return found


def stream_change(states: np.ndarray, window: int = ROLLING) -> np.ndarray:
    """Return the rolling mean of ``|h(t) - h(t - 1)|`` over the trailing window, ``[N, T]``.

    The first token changes by 0.

    Args:
        states: ``[N, T, d]`` after each layer.
    """
    change = np.linalg.norm(np.diff(states, axis=1, prepend=states[:, :1]), axis=-1)
    total = np.concatenate([np.zeros((len(change), 1)), change.cumsum(1)], 1)
    stop = np.arange(1, change.shape[1] + 1)
    start = np.maximum(stop - window, 0)
    return np.asarray((total[:, stop] - total[:, start]) / (stop - start))


def spearman(one: np.ndarray, two: np.ndarray) -> float:
    """Return the correlation of ranks, equal values sharing theirs; NaN where one is constant."""
    ranks = []
    for values in (one, two):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((counts.cumsum() - (counts - 1) / 2)[inverse])
    if not all(rank.std() for rank in ranks):
        return float("nan")
    return float(np.corrcoef(np.stack(ranks))[0, 1])


def occluded(documents: Documents, padding: torch.Tensor, start: int, stop: int) -> Documents:
    """Return a document with the tokens ``start`` to ``stop`` replaced, at the same positions.

    Args:
        documents: a single one; padding: ``[d]``, the embedding that takes their place.
    """
    hidden = documents.hidden.clone()
    hidden[start:stop] = padding
    deepstack = []
    for where, features in documents.deepstack:
        stays = (where < start) | (where >= stop)
        deepstack.append((where[stays], features[stays]))
    return replace(documents, hidden=hidden, deepstack=tuple(deepstack))


@torch.no_grad()
def occlusion_labels(
    engine: Runtime,
    inputs: Mapping[str, Any],
    padding: int,
    end_of_thought: int | None = None,
    window: int = WINDOW,
    stride: int = STRIDE,
) -> np.ndarray | None:
    """Label the tokens of a dialogue by whether its last answer needs them.

    Tested is what the last reply thinks, up to ``end_of_thought``; without one, everything before
    the last question.

    Args:
        inputs: what the processor returns, and ``labels``; padding: the token that hides others.

    Returns:
        int8 ``[T]``, 1 important, 0 not, -1 not tested; None where the answer is wrong already.
    """
    labels = inputs["labels"][0]
    documents = lay_out(engine, [{k: v for k, v in inputs.items() if k not in ("labels", "cuts")}])
    answers = spans(labels.tolist())
    begin, end = answers[-1]
    first, last = 0, answers[-2][1] if len(answers) > 1 else begin
    if end_of_thought is not None:
        ends = (labels[begin:end] == end_of_thought).nonzero().flatten().tolist()
        if ends:
            first, last = begin, begin + ends[0]
            begin = last + 1

    def right(shown: Documents) -> bool:
        states = full_attention_states(engine, shown)[begin - 1 : end - 1]
        said = engine.decoder.logits(states).argmax(-1).cpu()
        return bool((said == labels[begin:end]).all())

    if not right(documents):
        return None
    hidden = engine.decoder.embed(torch.tensor([padding], device=engine.device))[0]
    made = np.full(len(labels), -1, np.int8)
    made[first:last] = 0
    for start in range(first, last, stride):
        stop = min(start + window, last)
        if not right(occluded(documents, hidden, start, stop)):
            made[start:stop] = 1
        if stop == last:
            break
    return made


def measure(
    model: str, data: str, dialogues: int, window: int = WINDOW, stride: int = STRIDE
) -> Bands:
    """Correlate every layer's change with occlusion labels over the tokens of some dialogues.

    Raises:
        InputError: no dialogue is answered right, or nothing in them changes an answer.
    """
    engine = Runtime.from_pretrained(model, policy="full", device="cpu")
    tokenizer = load_processor(model).tokenizer
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    thought = tokenizer.convert_tokens_to_ids("</think>")
    thought = None if thought in (None, tokenizer.unk_token_id) else thought
    held = examples(model, [data], dialogues, 0, split="heldout")
    changes, labels = [], []
    for index in range(dialogues):
        inputs = held[index]
        found = occlusion_labels(engine, inputs, padding, thought, window, stride)
        if found is not None:
            bare = {k: v for k, v in inputs.items() if k not in ("labels", "cuts")}
            changes.append(stream_change(look(engine, bare).states))
            labels.append(found)
    if not labels:
        raise InputError(f"{model} answers none of {dialogues} dialogues of {data}; give others")
    pooled, change = np.concatenate(labels), np.concatenate(changes, 1)
    tested = pooled >= 0
    important = float(pooled[tested].mean())
    if important in (0.0, 1.0):
        raise InputError(
            f"{important:.0%} of the tokens of {data} change the answer; give dialogues in which "
            "some do"
        )
    rho = np.array([spearman(layer[tested], pooled[tested]) for layer in change])
    return Bands(rho, labels[0], important, len(labels))


def draw(figure: Figure, found: Bands) -> None:
    """Draw rho by layer, and the labels of one dialogue."""
    bars, strip = figure.subplots(2, 1, height_ratios=(5, 1))
    colours = ["C0" if value > 0 else "C3" for value in found.rho]
    bars.bar(range(len(found.rho)), found.rho, color=colours)
    bars.axhline(0, color="0.4", linewidth=0.8)
    bars.set(xlabel="layer", ylabel="Spearman's rho")
    strip.imshow(found.labels[None], aspect="auto", cmap="viridis", interpolation="nearest")
    strip.set(yticks=[], xlabel="token: yellow important, green not, violet not tested")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print rho by layer and the bands, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bands", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", default=str(bundled_model()))
    parser.add_argument("--data", default="scenes:sparse", help="as of mmkv distill --data")
    parser.add_argument("--dialogues", type=int, default=16)
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens that are hidden at once")
    parser.add_argument("--stride", type=int, default=STRIDE)
    args = parser.parse_args(arguments)
    try:
        for name in ("dialogues", "window", "stride"):
            if getattr(args, name) < 1:
                raise InputError(f"--{name} is {getattr(args, name)}; give 1 or more")
        found = measure(args.model, args.data, args.dialogues, args.window, args.stride)
    except MmkvError as error:
        print(f"benchmarks.bands: error: {one_line(str(error))}", file=sys.stderr)
        return 1
    for layer, rho in enumerate(found.rho):
        print(f"layer {layer:3}  {rho:+.3f}")
    print(found.says())
    return 0


if __name__ == "__main__":
    sys.exit(main())
