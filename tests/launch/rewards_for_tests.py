"""Reward functions that the system tests name in their recipes."""

from __future__ import annotations

import time
from collections.abc import Iterator


def length(prompt: str, completion: str, answer: str) -> float:
    """Anything that tells answers of one group apart: a model that knows nothing gets nothing right."""
    return len(completion) % 5 / 4


def leveled(prompt: str, completion: str, answer: str, level: int = 0) -> float:
    """Takes a further field of the row."""
    return length(prompt, completion, answer) * level


def leveled_by_name(prompt: str, completion: str, answer: str, **fields: int) -> float:
    """Takes all of them."""
    return leveled(prompt, completion, answer, fields["level"])


def slow(prompt: str, completion: str, answer: str) -> float:
    """As `length`, on a task that takes its time."""
    time.sleep(0.02)
    return length(prompt, completion, answer)


def hanging(prompt: str, completion: str, answer: str) -> float:
    """Judges the gold answer, and nothing else."""
    while completion != answer:
        time.sleep(1)
    return 1.0


def not_a_number(prompt: str, completion: str, answer: str) -> float:
    return 1.0 if completion == answer else float("nan")


def now_and_then(prompt: str, completion: str, answer: str) -> float:
    """Cannot judge one answer in five."""
    if len(completion) % 5 == 0:
        raise ValueError("a length divisible by five")
    return length(prompt, completion, answer)


def generator(prompt: str, completion: str, answer: str) -> Iterator[float]:
    yield 1.0
