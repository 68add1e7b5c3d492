"""math-verify, used as its documentation shows, as a reward: the benchmark of the verifier compares with it."""

from __future__ import annotations

import logging

from math_verify import parse, verify

logging.disable(logging.CRITICAL)


def math_verify(prompt: str, completion: str, answer: str) -> bool:
    """``verify(parse(gold), parse(answer))``, with math-verify's own time limits."""
    return bool(verify(parse(answer), parse(completion)))
