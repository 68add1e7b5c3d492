"""Extraction of the final answer from a completion, for rewards that define one. maj@n counts these answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from stretto_verify.math.extract.final import final_answer, without_frame

_LONGEST = 20_000  # characters at the end of a completion that are searched for its final answer
_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def _of_math(prompt: str, completion: str) -> str | None:
    found = final_answer(without_frame(completion[-_LONGEST:], prompt[-_LONGEST:]))
    return _plain(found.text) if found is not None else None


def _last_number(prompt: str, completion: str) -> str | None:
    found = _NUMBER.findall(completion[-_LONGEST:])
    return found[-1].replace(",", "") if found else None


def _behind_the_last_sign(prompt: str, completion: str) -> str | None:
    return _plain(completion.rpartition("=")[2])


def _whole(prompt: str, completion: str) -> str | None:
    return _plain(completion)


def _tagged(prompt: str, completion: str) -> str | None:
    found = _TAGGED.findall(completion)
    return _plain(found[-1] if found else completion)


def _plain(text: str) -> str | None:
    return " ".join(text.split()) or None


#: By name of the reward: function from (prompt, completion) to the final answer, or None. Other rewards have no maj@n.
FINAL_ANSWERS: Mapping[str, Callable[[str, str], str | None]] = {
    "exact_match": _whole,
    "final_answer": _behind_the_last_sign,
    "last_number": _last_number,
    "math": _of_math,
    "reasoning_gym": _tagged,
}
