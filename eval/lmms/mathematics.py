"""Questions of mathematics: what a reply answers, and whether that equals the reference.

An answer is what stands in the reply's last ``\\boxed{}``, else what follows its last "the answer
is"; nothing else is searched, so that a reply which was cut off has none. Two answers are equal as
written once blanks, dollar signs, units and spellings of the same LaTeX are dropped; as numbers,
exactly; as expressions, where they have the same value at several points; or part by part (lists,
tuples, intervals, matrices). Rounded decimals do not equal a fraction.

Nothing of a reply is run: expressions are read by a small parser of their own.
"""

from __future__ import annotations

import cmath
import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from mmkv.engine.errors import InputError
from mmkv.eval.measure.stats import mean

PROMPT = "post_prompt"  # the key in lmms_eval_specific_kwargs


def question(doc: dict[str, Any], kwargs: dict[str, Any] | None = None) -> str:
    """Return the question with the task's instruction behind it. Raises InputError."""
    text = _column(doc, "problem", "question")
    if text is None:
        raise InputError(f"a row has no problem and no question, but {', '.join(doc)}")
    return str(text).strip() + str((kwargs or {}).get(PROMPT, ""))


def reference(doc: dict[str, Any]) -> str:
    """Return the reference answer: the row's own, GSM8K's behind ####, or the solution's box.

    Raises InputError.
    """
    given = _column(doc, "answer")
    if given is not None and str(given).strip():
        return str(given).rpartition("####")[2].strip()
    found = boxed(str(_column(doc, "solution") or ""))
    if found is None:
        raise InputError(f"a row has no answer and no boxed solution, but {', '.join(doc)}")
    return found


def score(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """Count a question's replies that are right, and those that give an answer at all."""
    replies = results[0] if isinstance(results[0], (list, tuple)) else list(results)
    wanted, found = reference(doc), [answer_in(reply) for reply in replies]
    right = sum(one is not None and equal(one, wanted) for one in found)
    counts = {"right": right, "of": len(found)}
    answered = {"right": sum(one is not None for one in found), "of": len(found)}
    return {
        "pass_at_1": counts,
        "pass_at_1_low": counts,
        "pass_at_1_high": counts,
        "answered": answered,
    }


def low(results: Sequence[dict[str, Any]]) -> float:
    """Return the lower end of the 95 % bootstrap interval over questions."""
    return mean([r["right"] for r in results], [r["of"] for r in results]).low


def high(results: Sequence[dict[str, Any]]) -> float:
    """Return the upper end of the 95 % bootstrap interval over questions."""
    return mean([r["right"] for r in results], [r["of"] for r in results]).high


def _column(doc: dict[str, Any], *names: str) -> Any:
    """Return the first of the columns that a row has: data sets differ in capitals."""
    lower = {key.lower(): value for key, value in doc.items()}
    return next((lower[name] for name in names if lower.get(name) is not None), None)


# --- The answer in a reply ------------------------------------------------------------------------

_SAID = re.compile(r"answer\s*(?:is|:)\**\s*:?\s*(.+)", re.IGNORECASE)


def answer_in(reply: str) -> str | None:
    """Return the answer that a reply gives, None where it gives none."""
    found = boxed(reply)
    if found is None:
        said = _SAID.findall(reply)
        found = said[-1] if said else None
    found = (found or "").strip().removesuffix(".").strip("*")
    return found if found.strip(" .") else None


_LONGEST = 1000  # letters of an answer: a reply that repeats itself opens thousands of boxes


def boxed(text: str) -> str | None:
    """Return what stands in the last box of a text, None where no box is closed."""
    for found in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*", text))):
        rest = text[found.end() :]
        if not rest.startswith("{"):
            plain = re.match(r"[^\s$.,]+", rest)
            return plain[0] if plain else None
        inside = _group(rest)
        if inside is not None:
            return inside
    return None


def _group(text: str) -> str | None:
    """Return what stands in the braces with which a text begins, None where they stay open."""
    depth = 0
    for at, mark in enumerate(text[:_LONGEST]):
        if mark in "{}" and text[at - 1 : at] != "\\":
            depth += 1 if mark == "{" else -1
            if not depth:
                return text[1:at]
    return None


# --- Equal as written -----------------------------------------------------------------------------

_UNITS = (
    "degrees? dollars? cents? units? square cubic inch inches feet foot ft yards? miles? mph mi "
    "cm mm m km meters? metres? centimeters? grams? kg g pounds? hours? minutes? seconds? days? "
    "weeks? years? people students? hr hrs min percent"
).replace(" ", "|")
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r",\\!\s*", ","),  # how MATH sets thousands apart
    (r"\\(?:left|right|bigl?|bigr?|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"\\[,;:!> ]|~|\\(?:q?quad)(?![a-zA-Z])", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree|°", ""),
    (r"\\?%", ""),
    (r"\\?\$", ""),
    (r"\\(?:cdot|times)(?![a-zA-Z])", "*"),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\\infty|∞", r"\\infty "),
    (r"\\pi(?![a-zA-Z])|π", r"\\pi "),
    (r"\\(?:lbrace|\{)", r"\\{"),
    (r"\\(?:rbrace|\})", r"\\}"),
    (r"−", "-"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
    (r"\{,\}", ","),
    (r"_\{(\w+)\}", r"_\1"),
)
_ROW = "\0"  # stands for the end of a matrix's row, which is no blank behind a backslash
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"
)
_UNIT = re.compile(rf"(?<=[\d}}])\s*(?:(?:{_UNITS})\.?(?:\s*\^?\{{?[23]\}}?)?\s*)+$", re.IGNORECASE)
_NAMED = re.compile(r"^[a-zA-Z](?:\([a-zA-Z]\))?\s*(?:=|\\in(?![a-zA-Z]))\s*(?=\S)")


def normal(answer: str) -> str:
    """Return an answer without what does not matter: blanks, units, spellings of the same LaTeX."""
    text = answer.strip().replace(r"\\", _ROW)
    for mark in (r"\(", r"\)", r"\[", r"\]"):
        text = text.replace(mark, "")
    for pattern, spelling in _SPELLINGS:
        text = re.sub(pattern, spelling, text)
    text = re.sub(r"\s(?:and|or)\s", ",", _TEXT.sub(r" \1 ", text))
    text = _UNIT.sub("", text.strip().rstrip(".").strip())
    text = _NAMED.sub("", text)
    text = re.sub(r"(?<![\d,])\d{1,3}(?:,\d{3})+(?![\d,])", lambda m: m[0].replace(",", ""), text)
    return re.sub(r"\s+", "", text).rstrip(".")


def equal(given: str, wanted: str) -> bool:
    """Whether two answers are the same."""
    return len(given) <= _LONGEST and _equal(normal(given), normal(wanted))


def _equal(given: str, wanted: str) -> bool:
    if given == wanted or given.lower() == wanted.lower():
        return True
    if not given or not wanted:
        return False
    parts, wanted_parts = _parts(given), _parts(wanted)
    if parts is not None or wanted_parts is not None:
        if parts is None or wanted_parts is None or parts[0] != wanted_parts[0]:
            return _bare(given) == _bare(wanted)
        ordered = parts[0] not in ("{", "cup")
        return _all_equal(parts[1], wanted_parts[1], ordered)
    if _bare(given).lower() == _bare(wanted).lower():
        return True
    numbers = _number(given), _number(wanted)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return _same_value(given, wanted)


def _bare(text: str) -> str:
    """Return a single letter or word without the brackets around it, as choices are given."""
    found = re.fullmatch(r"[(\[]([a-zA-Z]+)[)\]]", text)
    return found[1] if found else text


def _all_equal(given: Sequence[str], wanted: Sequence[str], ordered: bool) -> bool:
    if len(given) != len(wanted):
        return False
    if ordered:
        return all(map(_equal, given, wanted))
    left = list(wanted)
    for one in given:
        match = next((other for other in left if _equal(one, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


_MATRIX = re.compile(r"\\begin\{([pbv]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}")


def _parts(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets of a list, and its members; None where it is no list.

    A list without brackets and a set have the brackets ``{``: their order does not matter.
    """
    if found := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in found[2].split(_ROW) if row]
        return f"matrix{[len(row) for row in rows]}", [cell for row in rows for cell in row]
    if r"\cup" in text:
        return "cup", text.split(r"\cup")
    bracketed = re.fullmatch(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", text)
    if bracketed:
        members = _split(bracketed[2])
        if members is not None and (len(members) > 1 or bracketed[1] == r"\{"):
            kind = bracketed[1] + bracketed[3]
            return ("{" if kind == r"\{\}" else kind), members
    members = _split(text)
    if members is not None and len(members) > 1:
        return "{", [_NAMED.sub("", member) for member in members]
    return None


def _split(text: str) -> list[str] | None:
    """Split at the commas outside of brackets; None where they do not pair."""
    depth, made = 0, [""]
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return None
        if mark == "," and not depth:
            made.append("")
        else:
            made[-1] += mark
    return None if depth else [part for part in made if part]


# --- Equal as numbers and expressions -------------------------------------------------------------

_MIXED = re.compile(r"(-?)(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")


def _number(text: str) -> Fraction | None:
    """Return the exact value of a number as it is usually written, None for anything else."""
    if found := _MIXED.fullmatch(text):
        sign, whole, over, under = found.groups()
        if int(under):
            value = int(whole) + Fraction(int(over), int(under))
            return -value if sign else value
    if found := _FRACTION.fullmatch(text):
        sign, over, under = found.groups()
        if int(under):
            value = Fraction(int(over), int(under))
            return -value if sign else value
    if re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)", text) or re.fullmatch(
        r"[+-]?\d+/0*[1-9]\d*", text
    ):
        return Fraction(text)
    return None


_TOKENS = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|[a-zA-Z+\-*/^(){}!\[\]]")
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    r"\sin": cmath.sin,
    r"\cos": cmath.cos,
    r"\tan": cmath.tan,
    r"\ln": cmath.log,
    r"\log": cmath.log10,
    r"\exp": cmath.exp,
}
_POINTS = (0.7310585786, 1.6180339887, -0.4142135624)


class _NotReadError(Exception):
    """The text is no expression that is known here."""


class _Expression:
    """The value of an expression at a point: each letter stands for a number of its own."""

    def __init__(self, text: str, point: float) -> None:
        self._tokens = _TOKENS.findall(text)
        if "".join(self._tokens) != text or len(self._tokens) > 200:
            raise _NotReadError
        self._at, self._point = 0, point

    def value(self) -> complex:
        made = self._sum()
        if self._at != len(self._tokens):
            raise _NotReadError
        return made

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> bool:
        found = self._next() in wanted and bool(self._next())
        self._at += found
        return found

    def _need(self, wanted: str) -> None:
        if not self._take(wanted):
            raise _NotReadError

    def _sum(self) -> complex:
        made = self._product()
        while (sign := self._next()) in ("+", "-"):
            self._at += 1
            other = self._product()
            made = made + other if sign == "+" else made - other
        return made

    def _product(self) -> complex:
        if self._take("-"):
            return -self._product()
        if self._take("+"):
            return self._product()
        made = self._power()
        while True:
            if self._take("*"):
                made *= self._signed_power()
            elif self._take("/"):
                made /= self._signed_power()
            elif self._next() and self._next() not in ("+", "-", ")", "}", "]", "^", "!"):
                made *= self._power()
            else:
                return made

    def _signed_power(self) -> complex:
        return -self._power() if self._take("-") else self._power()

    def _power(self) -> complex:
        made = self._atom()
        while self._take("!"):
            if made.imag or made.real % 1 or not 0 <= made.real <= 100:
                raise _NotReadError
            made = complex(math.factorial(int(made.real)))
        if self._take("^"):
            exponent = self._signed_power() if self._next() == "-" else self._atom()
            made = made**exponent
        return made

    def _group(self) -> complex:
        self._need("{")
        made = self._sum()
        self._need("}")
        return made

    def _argument(self) -> complex:
        """Read what stands in braces, or, without them, the one token that LaTeX takes."""
        if self._next() == "{":
            return self._group()
        if not re.fullmatch(r"\d|[a-zA-Z]|\\pi", self._next()):
            raise _NotReadError
        return self._atom()

    def _atom(self) -> complex:
        token = self._next()
        self._at += 1
        if re.fullmatch(r"[\d.]+", token):
            return complex(float(token))
        if token in ("(", "{"):
            made = self._sum()
            self._need(")" if token == "(" else "}")
            return made
        if token == r"\frac":
            over = self._argument()
            return over / self._argument()
        if token == r"\sqrt":
            root = complex(2)
            if self._take("["):
                root = self._sum()
                self._need("]")
            return self._group() ** (1 / root)
        if token == r"\pi":
            return complex(math.pi)
        if token in _FUNCTIONS:
            return _FUNCTIONS[token](self._power())
        if token == "i":
            return 1j
        if re.fullmatch("[a-zA-Z]", token):
            return complex(self._point + ord(token) / 37)
        raise _NotReadError


def _same_value(given: str, wanted: str) -> bool:
    """Whether two expressions have the same value at several points."""
    try:
        return all(
            cmath.isclose(
                _Expression(given, point).value(),
                _Expression(wanted, point).value(),
                rel_tol=1e-10,
                abs_tol=1e-12,
            )
            for point in _POINTS
        )
    except (_NotReadError, ArithmeticError, ValueError, RecursionError):
        return False
