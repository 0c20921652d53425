"""The measures of the long-text benchmarks, each as its benchmark computes it.

Two ROUGE-L measures differ on purpose: LongBench counts each word once (``rouge`` 1.0.1), SCBench
and HELMET count words as often as they stand there (``rouge_score`` 0.1.2). Both were compared with
those packages on 3,000 pairs of drawn texts, BLEU with nltk 3.10, code similarity with fuzzywuzzy
0.18: none differs. nDCG follows trec_eval.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Any, NamedTuple

from mmkv.engine.errors import InputError

LETTERS = "ABCD"
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# Signs of Chinese texts that are no words, beside those of ASCII.
_CHINESE = str.maketrans(
    "",
    "",
    f"{string.punctuation}！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣"
    "､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏",
)


def normalized(text: str) -> str:
    """Return the words of an English text: lower case, no punctuation, no articles, one blank."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Compute the F1 of what two lists have in common, each as often as it stands there."""
    same = sum((Counter(one) & Counter(other)).values())
    return 2 * same / (len(one) + len(other)) if same else 0.0


def qa_f1(reply: str, answer: str) -> float:
    """Compute the F1 of normalized words (LongBench, SQuAD)."""
    return f1(normalized(reply).split(), normalized(answer).split())


def chinese_f1(reply: str, answer: str) -> float:
    """Compute the F1 of characters (SCBench's Chinese questions)."""
    one, other = ("".join(text.lower().translate(_CHINESE).split()) for text in (reply, answer))
    return f1(one, other)


def is_same(reply: str, answer: str) -> float:
    """Say whether the normalized texts are the same."""
    return float(normalized(reply) == normalized(answer))


def has_answer(reply: str, answer: str) -> float:
    """Say whether the normalized answer stands in the normalized reply."""
    return float(normalized(answer) in normalized(reply))


def best(measure: Callable[[str, str], float], reply: str, answers: Iterable[str]) -> float:
    """Return the best score of a reply over several answers; 0 where there are none."""
    return max((measure(reply, answer) for answer in answers), default=0.0)


# Of LongBench.


def classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    """Compute 1 / (classes named in the reply), 0 if the right one is not among them.

    A class that is part of the right one's name does not count, but for one that follows such a
    class at once: the published code goes over a list while it removes from it.
    """
    named = [name for name in classes if name in reply]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]
        at += 1
    return 1 / len(named) if answer in named else 0.0


def number_share(reply: str, number: str) -> float:
    """Compute which share of the numbers in a reply is the right one (counting, retrieval)."""
    found = re.findall(r"\d+", reply)
    return found.count(number) / len(found) if found else 0.0


def paragraph_share(reply: str, answer: str) -> float:
    """Do as :func:`number_share` with the number in ``Paragraph 7``. Raises InputError."""
    number = re.search(r"Paragraph (\d+)", answer)
    if number is None:
        raise InputError(f"the answer {answer[:60]!r} names no paragraph; get the file again")
    return number_share(reply, number[1])


def code_similarity(reply: str, line: str) -> float:
    """Compare a line of code with the reply's first one that is no fence and no comment.

    Twice the matching characters over all characters, in whole percents (``fuzz.ratio``).
    """
    lines = reply.lstrip("\n").split("\n")
    code = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    if not code or not line:
        return float(code == line)
    return round(100 * SequenceMatcher(None, code, line).ratio()) / 100


def rouge_l(reply: str, answer: str) -> float:
    """Compute ROUGE-L of LongBench: sentences end at full stops, each word counts once.

    The words of the longest common subsequences of all pairs of sentences, over the words of each
    text.
    """
    texts = [[" ".join(one.split()) for one in text.split(".") if one] for text in (reply, answer)]
    if not all(texts):
        return 0.0
    said, wanted = ([sentence.split(" ") for sentence in text] for text in texts)
    common: set[str] = set()
    for reference in wanted:
        for sentence in said:
            common |= {reference[i] for i in _common(reference, sentence, ties_left=False)}
    precision, recall = (
        len(common) / len({word for sentence in text for word in sentence})
        for text in (said, wanted)
    )
    return 2 * precision * recall / (precision + recall + 1e-8)


# Of SCBench and HELMET.


class Rouge(NamedTuple):
    """Precision, recall and F1, each from 0 to 1."""

    precision: float
    recall: float
    f1: float


Stem = Callable[[str], str]


@cache
def porter_stem() -> Stem:
    """Return the Porter stemmer of nltk, for words of more than three letters. Raises InputError
    without nltk.
    """
    try:
        from nltk.stem.porter import PorterStemmer
    except ImportError as error:
        raise InputError("this score needs nltk; run pip install nltk") from error
    stem = PorterStemmer().stem
    return lambda word: stem(word) if len(word) > 3 else word


def words(text: str, stem: Stem | None = None) -> list[str]:
    """Split a text into runs of ASCII letters and digits, in lower case."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    return found if stem is None else [stem(word) for word in found]


def rouge_longest(reply: str, answer: str, stem: Stem | None = None) -> Rouge:
    """Compute ROUGE-L of the whole texts."""
    said, wanted = words(reply, stem), words(answer, stem)
    return _rouge(_lengths(wanted, said)[-1][-1], len(said), len(wanted))


def rouge_summary(reply: str, answer: str, stem: Stem | None = None) -> Rouge:
    """Compute ROUGE-Lsum: the union of common subsequences, line by line of the answer."""
    said, wanted = (
        [words(line, stem) for line in text.split("\n") if line] for text in (reply, answer)
    )
    left = [Counter(word for line in text for word in line) for text in (said, wanted)]
    sizes = [counts.total() for counts in left]
    hits = 0
    for line in wanted:
        places = sorted({at for other in said for at in _common(line, other, ties_left=True)})
        for word in (line[at] for at in places):
            if all(counts[word] for counts in left):
                hits += 1
                for counts in left:
                    counts[word] -= 1
    return _rouge(hits, *sizes)


def _rouge(hits: int, said: int, wanted: int) -> Rouge:
    if not hits:
        return Rouge(0.0, 0.0, 0.0)
    return Rouge(hits / said, hits / wanted, 2 * hits / (said + wanted))


def _lengths(one: Sequence[str], other: Sequence[str]) -> list[list[int]]:
    """Return the lengths of the longest common subsequences of all beginnings."""
    table = [[0] * (len(other) + 1)]
    for left in one:
        above, row = table[-1], [0]
        for at, right in enumerate(other):
            row.append(above[at] + 1 if left == right else max(row[at], above[at + 1]))
        table.append(row)
    return table


def _common(one: Sequence[str], other: Sequence[str], ties_left: bool) -> list[int]:
    """Return the places in ``one`` of a longest common subsequence; which one, is published code's
    choice: where both ways are as long, ``one`` is shortened first (``ties_left``) or ``other``.
    """
    table, found = _lengths(one, other), []
    i, j = len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            i, j = i - 1, j - 1
            found.append(i)
        elif table[i - 1][j] - table[i][j - 1] + ties_left > 0:
            i -= 1
        else:
            j -= 1
    return found


def choice(reply: str, answer: str, letter: str) -> float:
    """Score a choice of SCBench: the first letter, the answer's text, or what follows "answer is".

    Where none of that is found, the first word that stands in ``ABCD``.
    """
    right = (answer, letter)
    text = reply.strip()
    if not text or text[0] in LETTERS:
        return float(bool(text) and text[0] in right)
    if text in right:
        return 1.0
    text = re.sub(r" +", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
    for phrase in ("answer is:", "answer:", "answer is", "option is"):
        _, found, after = text.partition(phrase)
        if found:
            return float(after[1:].startswith(right))
    first = next((word for word in text.split() if word in LETTERS), None)
    return float(first in right)


def first_number(reply: str) -> str:
    """Return the first run of digits of a reply, empty where there is none."""
    found = re.search(r"[0-9]+", reply)
    return found[0] if found else ""


def same_number(reply: str, number: float) -> float:
    """Compare the first number of a reply; where a whole one is wanted, what follows the point is
    left out.
    """
    found = re.search(r"\d+\.\d+|\d+", reply)
    if found is None:
        return 0.0
    value = float(found[0])
    return float((int(value) if isinstance(number, int) else value) == number)


def share_found(reply: str, answers: Sequence[str]) -> float:
    """Compute which share of the answers stands in the reply, whatever the case."""
    return sum(answer.lower() in reply.lower() for answer in answers) / len(answers)


def bleu(reply: str, answer: str) -> float:
    """Compute sentence BLEU up to four words, split at blanks, missing lengths smoothed.

    By the fourth smoothing of Chen and Cherry (2014): the n-th length without a match counts
    ln(words) / (5 * 2^n) matches.
    """
    said, wanted = re.split(r"\s+", reply.strip()), re.split(r"\s+", answer.strip())
    logs, missing = 0.0, 0
    for size in range(1, 5):
        grams = [
            Counter(tuple(text[at : at + size]) for at in range(len(text) - size + 1))
            for text in (said, wanted)
        ]
        same = float((grams[0] & grams[1]).total())
        if not same and size == 1:
            return 0.0
        if not same and len(said) > 1:
            missing += 1
            same = math.log(len(said)) / (5 * 2**missing)
        if same:  # of a single word the longer lengths are left out
            logs += math.log(same / max(1, grams[0].total())) / 4
    brevity = 0.0 if len(said) > len(wanted) else 1 - len(wanted) / len(said)
    return math.exp(brevity + logs)


def code_block(reply: str) -> str:
    """Return the first fenced block of a reply, or all of it."""
    found = re.search(r"^```(?:\w+)?\s*\n(.*?)^```", reply.strip(), re.DOTALL | re.MULTILINE)
    return found[1] if found else reply.strip()


def function_found(reply: str, name: str, functions: Sequence[tuple[str, str]]) -> float:
    """Score RepoQA: the most similar function is the wanted one, with a BLEU of 0.8 or more.

    ``functions``: (name, text) of all that are asked for in the repository.
    """
    code = code_block(reply)
    score, found = 0.0, ""
    for other, text in functions:
        if (similar := bleu(code, text)) > score:
            score, found = similar, other
    return float(found == name and score >= 0.8)


# Of LongBench-v2 and HELMET.


def chosen_letter(reply: str) -> str | None:
    """Return the letter behind "The correct answer is"; None where that stands nowhere."""
    text = reply.replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text)
    found = found or re.search(r"The correct answer is ([A-D])", text)
    return found[1] if found else None


def after_prefix(reply: str, prefix: str = "Answer:") -> str:
    """Return the rest of the line behind ``prefix``; the first line where it stands nowhere."""
    line = re.search(rf"{re.escape(prefix)}(.*)(?:\n|$)", reply, re.IGNORECASE)
    text = (line or re.search(r"^(.*)(?:\n|$)", reply))[1].strip()  # type: ignore[index]
    return re.sub(f"^{re.escape(prefix)}", "", text, flags=re.IGNORECASE).strip()


def ranking(reply: str) -> list[str]:
    """Return the ids of the longest ``3 > 1 > 2`` in a reply, each once, best first."""
    text = re.sub(r"[\[\]:]", "", reply).lower().replace("id", "")
    longest = max(re.findall(r"\d+(?:\s*>\s*\d+)*", text), key=len, default="")
    return list(dict.fromkeys(part.strip() for part in longest.split(">") if part.strip()))


def ndcg(ranked: Sequence[str], labels: dict[str, int], most: int = 10) -> float:
    """Compute nDCG@``most`` of trec_eval: gains are the labels, discounts log2(rank + 1)."""
    gains = [labels.get(name, 0) for name in ranked]
    ideal = _discounted(sorted(labels.values(), reverse=True)[:most])
    return _discounted(gains[:most]) / ideal if ideal else 0.0


def _discounted(gains: Sequence[int]) -> float:
    return sum(max(gain, 0) / math.log2(at + 2) for at, gain in enumerate(gains))
