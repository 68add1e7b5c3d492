"""Tasks of the package reasoning-gym, judged by their own scorers.

A scorer needs the whole dataset entry of a question. So a gold answer holds task, parameters, seed and index, from
which the entry is generated again.

Many scorers give some points to nonsense, which a policy could exploit. So the highest score of nonsense, the *floor*,
is measured once per task, on its first questions. The reward is ``(score - floor) / (1 - floor)``, at least 0. A task
whose floor is above `HIGHEST_FLOOR` is refused. If a scorer raises, the completion is undecided.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stretto_verify.thoughts import said
from stretto_verify.verdicts import Undecided

_PACKAGE = "reasoning_gym"  # of the extra `reasoning`
HIGHEST_FLOOR = 0.5  #: a task in which nonsense scores more is refused
_MEASURED = 8  # questions
_NONSENSE = ("nonsense", "", "None", "I do not know.", "[]", "{}")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class _Gold:
    """A parsed gold answer: the values that generate a question again (`place`, from 0, of `size` questions of `task`),
    and a digest of the question's text, to check that it is the same."""

    task: str
    seed: int
    size: int
    place: int
    parameters: str  # JSON
    digest: str

    @classmethod
    def of(cls, answer: str) -> _Gold:
        """Parse a gold answer, a JSON object; Undecided if it is not from a reasoning-gym source."""
        try:
            row = json.loads(answer)
            return cls(
                row["task"], row["seed"], row["size"], row["place"], json.dumps(row["parameters"]), row["digest"]
            )
        except (ValueError, KeyError, TypeError):
            raise Undecided("the gold answer is not from a reasoning-gym source") from None


def reasoning_gym(prompt: str, completion: str, answer: str) -> float:
    """Score of a completion above the task's floor, scaled to 0 … 1. The content of the last ``<answer>...</answer>``
    is scored; without one, all text after the thoughts. 0 for a completion of thoughts alone.

    Raises:
        Undecided: the question cannot be generated again, its scorer raises or gives no finite score, or nonsense
            scores more than 0.5 in the task (its floor).
    """
    asked = _Gold.of(answer)
    entry, floor = _entry(asked), floor_of(asked.task, asked.parameters)
    text = said(completion, prompt)
    if completion.strip() and not text.strip():
        return 0.0
    tagged = _TAGGED.findall(text)
    score = _score(asked, (tagged[-1] if tagged else text).strip(), entry)
    return max(0.0, (score - floor) / (1.0 - floor))


def gold(prompt: str, completion: str, answer: str) -> bool:
    """Check a gold answer (prompt and completion are not read): generates its question again and measures the task's
    floor. Returns True.

    Raises:
        Undecided: the answer is from no reasoning-gym source, the question made again is not the same, or the floor is
            above 0.5; the reason says which.
    """
    asked = _Gold.of(answer)
    _entry(asked)
    return floor_of(asked.task, asked.parameters) <= HIGHEST_FLOOR


@lru_cache(maxsize=64)
def floor_of(task: str, parameters: str) -> float:
    """Measure the floor of a task: the highest score of nonsense over its first 8 questions. Nonsense that equals a
    question's true answer does not count. `parameters`: of the task, as JSON.

    Raises:
        Undecided: the floor is above 0.5, or the task cannot be made.
    """
    floor = 0.0
    for place in range(_MEASURED):
        asked = _Gold(task, 1, _MEASURED, place, parameters, "")
        entry = _generated(asked)
        for text in _NONSENSE:
            if text.strip() != str(entry["answer"]).strip():
                try:
                    floor = max(floor, _score(asked, text, entry))
                except Undecided:  # the scorer raised: no points
                    continue
    if floor > HIGHEST_FLOOR:
        raise Undecided(f"the scorer of reasoning-gym's {task} gives nonsense {floor:g}, more than {HIGHEST_FLOOR:g}")
    return floor


def _generated(asked: _Gold) -> Mapping[str, Any]:
    """Dataset entry of a question. Undecided if it cannot be generated; `digest` is not compared."""
    dataset = _made(asked.task, asked.seed, asked.size, asked.parameters)
    try:
        entry: Mapping[str, Any] = dataset[asked.place]
    # The generators are programs of many authors.
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        raise Undecided(f"question {asked.place} of {asked.task} cannot be made: {found}") from None
    return entry


def _entry(asked: _Gold) -> Mapping[str, Any]:
    """Dataset entry of a question. Undecided if it cannot be generated, or its text has another digest."""
    entry = _generated(asked)
    found = hashlib.blake2b(str(entry["question"]).encode(), digest_size=8).hexdigest()
    if found != asked.digest:
        raise Undecided(f"question {asked.place} of {asked.task} is not the same when it is made again")
    return entry


@lru_cache(maxsize=64)
def _made(task: str, seed: int, size: int, parameters: str) -> Any:
    """Dataset of a task, whose questions are generated on access; made once for equal arguments. Raises Undecided if
    the package reasoning-gym is missing or refuses the parameters."""
    try:
        package = importlib.import_module(_PACKAGE)
        return package.create_dataset(task, size=size, seed=seed, **json.loads(parameters))
    except ImportError as error:
        raise Undecided(
            f"the reward needs the package reasoning-gym ({error}): pip install 'stretto[reasoning]'"
        ) from None
    # The generators are programs of many authors.
    except Exception as error:
        raise Undecided(f"{task} cannot be made: {type(error).__name__}: {error}") from None


def _score(asked: _Gold, text: str, entry: Mapping[str, Any]) -> float:
    random.seed(0)  # a scorer may draw
    try:
        score = float(_made(asked.task, asked.seed, asked.size, asked.parameters).score_answer(text, entry))
    # The scorers are programs of many authors, and may raise anything.
    except Exception as error:
        raise Undecided(f"the scorer of {asked.task} raised {type(error).__name__}: {error}") from None
    if not math.isfinite(score):
        raise Undecided(f"the scorer of {asked.task} gave {score}")
    return score
