"""Reward functions that tests hand over as objects."""

from collections.abc import Callable


def length(prompt: str, completion: str, answer: str) -> float:
    """Anything that tells answers of one group apart."""
    return len(completion) % 5 / 4


def made() -> Callable[[str, str, str], float]:
    """A function that has no name of its own outside of this one."""

    def inner(prompt: str, completion: str, answer: str) -> float:
        return 0.0

    return inner
