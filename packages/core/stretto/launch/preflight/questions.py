"""Checks of the questions before the run: those whose gold answers the reward cannot read are left out; repeated ones
and digits of another script are warnings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.core.errors import DataError, Problem, RewardFunctionError, RoleError
from stretto.core.machine import cores
from stretto.core.records import Outcome
from stretto.launch.preflight.encoding import place_of
from stretto.rewards.built_in import BUILT_IN
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.judging import PLACE
from stretto.rewards.service.pool import DIED, TIMED_OUT, RewardPool
from stretto.rewards.service.wire import ScoreItem
from stretto.rollout.questions import Question, Questions


def repeated(questions: Questions, sets: Sequence[Question] = ()) -> list[str]:
    """Return warnings about questions that are both trained on and held out, or of one of the further `sets`, and about
    questions that a later row repeats, with another answer or with the same. Generated questions are exempt."""
    training = [row for row in questions.training if row.place]
    both = {row.place for row in training}  # one file may be given for both
    held_out, further = (
        [row for row in rows if row.place and row.place not in both] for rows in (questions.held_out, sets)
    )
    first = {_asked(row): row for row in reversed(training)}
    leaked, known = (
        [(row, first[_asked(row)]) for row in rows if _asked(row) in first] for rows in (held_out, further)
    )
    again = [*_again(training), *_again(held_out)]
    contrary = [(row, other) for row, other in (*leaked, *again) if row.answer != other.answer]
    same = [(row, other) for row, other in again if row.answer == other.answer]
    return [
        *_warning(leaked, "held-out questions that are also trained on, which biases the held-out accuracy"),
        *_warning(known, "questions of [[evaluation.sets]] that are also trained on, which biases their accuracy"),
        *_warning(contrary, "questions that an earlier row has with another answer"),
        *_warning(same, "questions that an earlier row has with the same answer"),
    ]


def _again(rows: Sequence[Question]) -> list[tuple[Question, Question]]:
    first = {_asked(row): row for row in reversed(rows)}
    return [(row, first[_asked(row)]) for row in rows if first[_asked(row)] is not row]


def _asked(row: Question) -> object:
    return row.text, tuple(tuple(sorted(message.items())) for message in row.messages)


def _warning(pairs: Sequence[tuple[Question, Question]], what: str) -> list[str]:
    if not pairs:
        return []
    row, other = pairs[0]
    return [f"{what}: {len(pairs):,}; the first is {row.place}, as in {other.place}"]


def strange_digits(questions: Questions) -> list[str]:
    """Return a warning if gold answers have digits such as ``１２`` (full width): no completion in plain digits equals
    them."""
    found = [(row, strange) for row in (*questions.training, *questions.held_out) if (strange := _strange(row))]
    if not found:
        return []
    row, strange = found[0]
    return [
        f"gold answers with digits other than 0 to 9, which completions in plain digits do not equal: {len(found):,}; "
        f"the first is {place_of(row)}: {strange!r} (U+{ord(strange):04X})"
    ]


def _strange(row: Question) -> str:
    return next((letter for letter in row.answer if not letter.isascii() and letter.isdecimal()), "")


_SHOWN = 20
_PORTION = 64  # number of gold answers that a worker reads within one deadline
_READING_SECONDS = 60.0  # far more than any readable gold answer takes


@dataclass(frozen=True)
class Sifted:
    """Questions whose gold answers can be read. `unreadable`: a problem for each other question."""

    questions: Questions
    unreadable: tuple[Problem, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Warnings; empty if no question is left out. The first has the number of questions that are left out. Each
        further one names a question, with file and line, and says why; at most twenty are named."""
        if not self.unreadable:
            return []
        count = len(self.unreadable)
        shown = [str(problem) for problem in self.unreadable[:_SHOWN]]
        return [f"{count:,} questions are left out: their gold answers cannot be read", *shown]


def sift(config: RewardsConfig, questions: Questions, reading_seconds: float = _READING_SECONDS) -> Sifted:
    """Leave out questions whose gold answers the reward cannot read. Only built-in rewards with a reader are checked.

    Reward workers read each gold answer once. A gold answer that takes longer than `reading_seconds` is an error: if
    its question were left out, the result would depend on the machine's speed.

    Raises:
        DataError: no gold answer of the training questions, or of the held-out ones, can be read; or one takes longer
            than `reading_seconds`.
        RewardFunctionError: the workers do not start.
    """
    asked = (*questions.training, *questions.held_out)
    reasons: dict[tuple[str, str], str] = {}  # by source and gold answer
    for part in config.parts:
        if part.function in BUILT_IN and (reader := BUILT_IN[part.function].gold):
            judged = [question for question in asked if not part.sources or question.source in part.sources]
            read = config.alone(part).model_copy(update={"function": reader})
            unread = _reasons(read, sorted({question.answer for question in judged}), reading_seconds)
            reasons |= {_key(question): unread[question.answer] for question in judged if question.answer in unread}
    if not reasons:
        return Sifted(questions)
    bad = [question for question in asked if _key(question) in reasons]
    problems = tuple(Problem(place_of(question), reasons[_key(question)]) for question in bad)
    if late := [problem for problem in problems if problem.found.startswith((TIMED_OUT, DIED))]:
        remedy = "shorten or remove these gold answers"
        raise DataError([Problem(problem.place, f"reading it: {problem.found}", remedy) for problem in late[:_SHOWN]])
    kept = replace(
        questions,
        training=[question for question in questions.training if _key(question) not in reasons],
        held_out=[question for question in questions.held_out if _key(question) not in reasons],
    )
    if not kept.training or (questions.held_out and not kept.held_out):
        which = "of the questions for training" if not kept.training else "that is held out"
        found = f"no gold answer {which} can be read by the reward {config.title!r}"
        raise DataError([*problems[:_SHOWN], Problem("[task]", found, f"{len(problems):,} cannot in all")])
    return Sifted(kept, problems)


def _key(question: Question) -> tuple[str, str]:
    return question.source, question.answer


def _reasons(config: RewardsConfig, golds: Sequence[str], seconds: float) -> dict[str, str]:
    """Return the reason for each gold answer that cannot be read within `seconds`, by gold answer: the reward's verdict
    on it is undecided. Raises RewardFunctionError if the workers do not start."""
    try:
        return asyncio.run(_unreadable(config, golds, seconds)) if golds else {}
    except RoleError as error:
        raise RewardFunctionError([Problem(PLACE, str(error))]) from None


async def _unreadable(config: RewardsConfig, golds: Sequence[str], seconds: float) -> dict[str, str]:
    """Return the reason for each gold answer that cannot be read within `seconds`, by gold answer. Readable ones are
    left out."""
    workers = max(config.workers, min(cores(), len(golds) // _PORTION))
    patient = {
        "max_consecutive_undecided": len(golds) + 1,
        "timeout": seconds,
        "workers": workers,
        # The deadline of a portion allows for its slowest gold answers.
        "patience": max(config.patience, 2 * _PORTION * seconds),
    }
    reasons: dict[str, str] = {}
    async with RewardPool(config.model_copy(update=patient)) as pool:
        for at in range(0, len(golds), _PORTION * workers):
            portion = golds[at : at + _PORTION * workers]
            verdicts = await pool.score([ScoreItem(prompt="", completion="", answer=gold) for gold in portion])
            pairs = zip(portion, verdicts, strict=True)
            reasons |= {gold: verdict.reason for gold, verdict in pairs if verdict.outcome is Outcome.UNDECIDED}
    return reasons
