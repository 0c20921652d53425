"""Promise that at most a share of the answers is lost to eviction: conformal risk control.

Each token of an answer has a score, known before it is drawn. At the first whose score reaches the
limit the answer is *escalated*: said to be doubtful, gone on with from the conversation read again
under a larger budget, or refused. What an answer loses by eviction is lost at a token, and is
caught if some score up to there reaches the limit. Of n calibrated dialogues let L_i(t) be the mean
over dialogue i's answers of what is lost and not caught by a limit of t. The limit is the largest t
with::

    (L_1(t) + ... + L_n(t) + 1) / (n + 1) <= alpha

L_i grows with t and is at most 1, so the expected L of one more dialogue, exchangeable with them,
is at most alpha (Angelopoulos et al., arXiv 2208.02814, theorem 1), whatever the model, the gates
and the score are: a better score only makes fewer answers doubtful.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from pydantic import Field, model_validator

from mmkv.engine.budget import Budget
from mmkv.engine.errors import ForgottenError, InputError, shown
from mmkv.engine.paths import open_regular, user_path
from mmkv.engine.strict import InvalidFile, Strict, parse

if TYPE_CHECKING:
    from torch import Tensor

    from mmkv.api import Engine
    from mmkv.session import Session

log = logging.getLogger("mmkv")
FORMAT: Final = "mmkv-calibration-1"
Loss = Literal["answers", "tokens"]
Score = Literal["both", "doubt", "risk"]
Outcome = Literal["said", "reread", "not_reread"]
LOSSES, SCORES = get_args(Loss), get_args(Score)
ON_RISK = ("say", "reread", "refuse")
_LARGEST_FILE = 2**28

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class CalibratedAnswer(Strict):
    """One answer.

    Attributes:
        score: the largest of its tokens.
        losses: what is lost of it, in parts that add up to at most 1: the largest score up to the
            token where it is lost, and how much.
    """

    score: Number
    losses: list[tuple[Number, Share]]

    @model_validator(mode="after")
    def _fit(self) -> CalibratedAnswer:
        if sum(loss for _, loss in self.losses) > 1 + 1e-9:
            raise ValueError("an answer loses more than itself")
        if any(at > self.score for at, _ in self.losses):
            raise ValueError("a score is above the largest of its answer")
        return self

    def lost(self, limit: float) -> float:
        """Return what is lost and not caught."""
        return sum(loss for at, loss in self.losses if at < limit)


class CalibratedDialogue(Strict):
    """The answers of one dialogue, in order."""

    answers: Annotated[list[CalibratedAnswer], Field(min_length=1)]

    def lost(self, limit: float) -> float:
        """Return the mean over its answers of what is lost and not caught."""
        return sum(one.lost(limit) for one in self.answers) / len(self.answers)

    def escalated(self, limit: float) -> float:
        """Return the share of its answers that are escalated."""
        return sum(one.score >= limit for one in self.answers) / len(self.answers)


class Calibration(Strict):
    """What ``mmkv calibrate`` has measured; the limit is computed from it, never read.

    Attributes:
        identity: what it holds for, see :func:`identity_of`.
        data: the names of its dialogues' sources.
        loss: ``answers``: right on the full cache and wrong under the budget, lost at the first
            token that differs; ``tokens``: each token for which another is the likeliest than on
            the full cache loses its share of the answer.
        score: ``doubt``: 1 less the probability of the likeliest token; ``risk``:
            :meth:`mmkv.Session.risk` when the question has been read, the same for all tokens;
            ``both``: their product.
        alpha: the share of the answers that may be lost.
    """

    format: Literal["mmkv-calibration-1"]
    identity: dict[str, str | int]
    data: list[str]
    loss: Loss
    score: Score
    alpha: Annotated[float, Field(gt=0, lt=1)]
    dialogues: list[CalibratedDialogue]

    @model_validator(mode="after")
    def _enough(self) -> Calibration:
        require_enough(self.alpha, len(self.dialogues))
        return self

    @cached_property
    def limit(self) -> float:
        """The score from which on an answer is doubtful; inf: none is."""
        return limit_of(self.dialogues, self.alpha)

    def escalated(self, limit: float) -> float:
        """Return the share of its own answers that ``limit`` escalates, a mean over dialogues."""
        return sum(one.escalated(limit) for one in self.dialogues) / len(self.dialogues)

    def lost(self, limit: float = math.inf) -> float:
        """Return the share of its own answers that are lost and not caught by ``limit``."""
        return sum(one.lost(limit) for one in self.dialogues) / len(self.dialogues)

    @property
    def promise(self) -> str:
        """Return what it promises, in a few words: an expectation over dialogues like its own."""
        what = "answers" if self.loss == "answers" else "tokens of answers"
        share = (
            f"at most {100 * self.alpha:g} % of the {what} are lost to eviction and not escalated"
        )
        return f"{share} ({len(self.dialogues)} dialogues of {', '.join(self.data)})"


def fewest(alpha: float) -> int:
    """Return how many dialogues ``alpha`` needs at least: with fewer, even no loss is too much."""
    return math.ceil(1 / alpha - 1 - 1e-9)


def require_enough(alpha: float, dialogues: int) -> None:
    """Raise InputError, a ValueError, where so many dialogues cannot promise ``alpha``."""
    if not 0 < alpha < 1:
        raise _NotPossible(f"a share of {alpha:g} cannot be promised; give one such as 0.05")
    if dialogues < fewest(alpha):
        raise _NotPossible(
            f"{dialogues} dialogues cannot promise {alpha:g}: that takes {fewest(alpha)} at least, "
            "and more where answers are lost"
        )


class _NotPossible(InputError, ValueError):
    """An InputError that pydantic takes as one of its own."""


def limit_of(dialogues: Sequence[CalibratedDialogue], alpha: float) -> float:
    """Return the largest score t such that answers below it lose at most alpha; inf: all may stay.

    Raises:
        InputError: too few dialogues.
    """
    require_enough(alpha, len(dialogues))
    left = alpha * (len(dialogues) + 1) - 1 + 1e-9
    parts = sorted(
        (at, loss / len(one.answers))
        for one in dialogues
        for answer in one.answers
        for at, loss in answer.losses
        if loss
    )
    for score, loss in parts:  # of equal scores all or none stay, so the first that breaks it ends
        left -= loss
        if left < 0:
            return score
    return math.inf


def read_calibration(path: str | Path) -> Calibration:
    """Read and check a file of ``mmkv calibrate``. Raises InputError."""
    try:
        with open_regular(user_path(path)) as file:
            text = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the calibration {path}: {error.strerror}; make one with mmkv calibrate"
        ) from error
    try:
        if len(text) > _LARGEST_FILE:
            raise InvalidFile("it is larger than any")
        made: Calibration = parse(Calibration, text, is_json=True)
    except InvalidFile as error:
        raise InputError(
            f"{path} is no calibration ({error}); make one with mmkv calibrate"
        ) from error
    return made


def identity_of(engine: Engine) -> dict[str, str | int]:
    """Return all settings of an engine on which scores and losses depend.

    Raises:
        InputError: sessions share a budget, so that what one forgets depends on others.
    """
    if engine.shared is not None:
        raise InputError("a calibration holds for a budget that conversations do not share")
    least, most = engine.pixels
    read = {"prefill_chunk": engine.prefill_chunk, "pixels": f"{least} to {most}"}
    return engine.identity() | {"budget": engine.budget.describe()} | read


def require_same(calibration: Calibration, engine: Engine, path: str | Path) -> None:
    """Raise InputError where a calibration was made for other settings than the engine's."""
    ours = identity_of(engine)
    for name in {**ours, **calibration.identity}:
        theirs = calibration.identity.get(name)
        if theirs != ours.get(name):
            raise InputError(
                f"{path} holds for {name} {shown(theirs, 300)}, and this engine has "
                f"{shown(ours.get(name), 300)}; calibrate again, or set what it holds for"
            )


def doubt_of(logits: Tensor) -> float:
    """Return 1 less the probability of the likeliest token of ``logits [vocab]``."""
    return 1 - float(logits.float().softmax(-1).max())


def score_of(name: Score, risk: float | None, doubt: float) -> float:
    """Return the score of a token.

    Args:
        risk: of the session when the question had been read; None: it is not known, and all that
            needs it is doubtful.
        doubt: of the token, see :func:`doubt_of`.
    """
    if name == "doubt":
        return doubt
    if risk is None:
        return math.inf
    return risk if name == "risk" else risk * doubt


@dataclass
class Weighing:
    """How one answer is weighed.

    Attributes:
        risk: see :func:`score_of`; score: the largest of its tokens so far.
        outcome: None: it is not doubtful so far; ``said``: it goes on as it stands; ``reread``:
            from the conversation read again; ``not_reread``: as it stands, for ``why``.
        logits: ``[vocab]`` of the token at which it became doubtful.
    """

    risk: float | None
    score: float = 0.0
    outcome: Outcome | None = None
    why: str = ""
    logits: Tensor | None = None


class LossControl:
    """Weighs the answers of an engine against a calibration.

    Attributes:
        action: what is done with doubtful answers; reread_budget: of conversations read again.
        answers: so far; outcomes: how many of them by :attr:`Weighing.outcome`, or ``refused``.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | Path,
        on_risk: str = "say",
        reread_budget: Budget | float | str | None = None,
    ) -> None:
        if engine.drafts is not None:
            raise InputError("lossless sessions forget nothing; leave out lossless or calibration")
        if on_risk not in ON_RISK:
            raise InputError(f"on_risk is {shown(on_risk)}; give {', '.join(ON_RISK)}")
        self.calibration = read_calibration(path)
        require_same(self.calibration, engine, path)
        self.action = on_risk
        self.reread_budget = Budget.of("100%" if reread_budget is None else reread_budget)
        engine.budgets.checked(self.reread_budget)
        self.answers = 0
        self.outcomes = dict.fromkeys(("said", "reread", "not_reread", "refused"), 0)
        self.drift = Drift(self.calibration)
        self._engine, self._lock = engine, threading.Lock()  # threads share an engine

    def begin(self, session: Session) -> Weighing | None:
        """Begin to weigh the next answer; None: the session's budget is another, or shared."""
        if session.budget != self._engine.budget or self._engine.shared is not None:
            return None
        with self._lock:
            self.answers += 1
        risk = None if self.calibration.score == "doubt" else session.risk()
        return Weighing(None if risk is None else risk.total)

    def doubtful(self, weighing: Weighing, logits: Tensor) -> bool:
        """Weigh the next token of an answer that was not doubtful so far.

        Raises:
            ForgottenError: it is, and doubtful answers are refused.
        """
        made = self.calibration
        score = score_of(made.score, weighing.risk, doubt_of(logits))
        weighing.score = max(weighing.score, score)
        if weighing.score < made.limit:
            return False
        weighing.logits = logits.clone()  # a GPU's next step writes into the same place
        if self.action == "refuse":
            self._count("refused")
            raise ForgottenError(
                "too much of what this answer may need has been forgotten: its score "
                f"({made.score}) is {weighing.score:.3g}, and the calibration's limit is "
                f"{made.limit:.3g}; ask in a new conversation"
            )
        return True

    def settle(self, weighing: Weighing, outcome: Outcome, why: str = "") -> None:
        """Note what becomes of an answer that is doubtful, also of one that was read again."""
        if weighing.outcome is not None:
            self._count(weighing.outcome, -1)
        weighing.outcome, weighing.why, weighing.logits = outcome, why, None
        self._count(outcome)

    def end(self, watched: Watched | None, weighing: Weighing) -> Watched:
        """Count the score of an answer that is over, or refused; see :meth:`Drift.note`."""
        with self._lock:
            return self.drift.note(watched, weighing.score)

    def _count(self, outcome: str, more: int = 1) -> None:
        with self._lock:
            self.outcomes[outcome] += more

    @property
    def escalated(self) -> int:
        """Count the answers that were doubtful."""
        return sum(self.outcomes.values())

    def describe(self) -> str:
        """Return what has become of the promise, in a line."""
        made = self.calibration
        return (
            f"{self.escalated} of {self.answers} answers escalated "
            f"({made.escalated(made.limit):.1%} in calibration); {self.drift.describe()}"
        )


# Conversations after which a drift is tested for, and of which a window then has had its last.
_TESTS = (16, 32, 64, 128, 256, 512, 1024)
_LEVEL = 0.05  # of all false alarms, however long it goes on

Watched = tuple[object, int, int]  # mark of the window, place in it, answers so far


class Drift:
    """Tests whether the scores come from where the calibration's do: its promise needs that.

    Answers of one conversation depend on each other, so each conversation counts with one of its
    answers, drawn evenly from those so far; each calibrated dialogue likewise. The two samples are
    compared (Kolmogorov-Smirnov, two-sided) after 16, 32, ... 1,024 conversations, and then anew in
    a window of the next 1,024. Test k of window w has the level 0.05 / (7 w (w + 1)): all tests
    together raise a false alarm with a probability of at most 0.05, for ever.

    Attributes:
        conversations: so far; alarm: after how many of them a drift was found; None: none was.
        missing: why nothing is tested, or None.
    """

    def __init__(self, calibration: Calibration) -> None:
        draw = random.Random(0)
        # A score is followed up to the limit, and no further.
        self._most = calibration.limit
        drawn = (draw.choice(one.answers).score for one in calibration.dialogues)
        self._calibrated = [min(one, self._most) for one in drawn]
        self._draw, self._picks, self._window = draw, list[float](), 1
        self._mark = object()  # of the window: no other one has it, nor another calibration's
        self.conversations = 0
        self.alarm: int | None = None
        self.missing: str | None = None
        self._test: Callable[..., Any] | None = None
        try:
            from scipy.stats import ks_2samp

            self._test = ks_2samp
        except ImportError:
            self.missing = "scipy is not installed; pip install 'mmkv[calibrate]'"

    def note(self, watched: Watched | None, score: float) -> Watched:
        """Count an answer's score, the largest of its tokens.

        Args:
            watched: what this returned for the conversation's answer before; None: it is its first.
        """
        score = min(score, self._most)
        if watched is not None and watched[0] is self._mark:
            mark, place, answers = watched
            if self._draw.random() < 1 / (answers + 1):
                self._picks[place] = score
            return mark, place, answers + 1
        if len(self._picks) in _TESTS:
            self._compare()
        if len(self._picks) == _TESTS[-1]:
            self._picks, self._window, self._mark = [], self._window + 1, object()
        self._picks.append(score)
        self.conversations += 1
        return self._mark, len(self._picks) - 1, 1

    def _compare(self) -> None:
        if self._test is None or self.alarm is not None:
            return
        level = _LEVEL / (len(_TESTS) * self._window * (self._window + 1))
        if self._test(self._calibrated, self._picks).pvalue < level:
            self.alarm = self.conversations
            log.warning(self.describe())

    def describe(self) -> str:
        """Say in a few words what was found."""
        if self.missing is not None:
            return f"drift is not watched ({self.missing})"
        if self.alarm is not None:
            return (
                f"DRIFT: after {self.alarm} conversations the scores are not the calibration's; "
                "its promise is in doubt: calibrate with dialogues like these"
            )
        return f"no drift in {self.conversations} conversations"
