"""Verdicts on answers in mathematics."""

from stretto_verify.math.reward import math
from stretto_verify.verdicts import Undecided


def verdict(expected: object, completion: object, prompt: str = "") -> str:
    """``right``, ``wrong`` or ``undecided``."""
    try:
        return "right" if math(prompt, str(completion), str(expected)) else "wrong"
    except Undecided:
        return "undecided"


def right(expected: object, completion: object, prompt: str = "") -> bool:
    return verdict(expected, completion, prompt) == "right"


def boxed(answer: object) -> str:
    return rf"\boxed{{{answer}}}"
