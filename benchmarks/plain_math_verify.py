"""math-verify as its documentation uses it, as a reward: what the benchmark of the verifier compares with."""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.disable(logging.CRITICAL)


def math_verify(prompt: str, completion: str, answer: str) -> bool:
    """``verify(parse(gold), parse(answer))``, with its own time limits."""
    return bool(verify(parse(answer), parse(completion)))
