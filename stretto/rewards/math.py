"""Right or wrong for answers of mathematics."""

from __future__ import annotations

from math_verify import parse, verify


def math(prompt: str, completion: str, answer: str) -> bool:
    """Is the final answer of `completion` equal to the gold `answer`?"""
    return bool(verify(parse(answer), parse(completion)))
