"""Reason why a completion in mathematics is wrong, in one sentence: its final answer as read, and that of the gold
text."""

from __future__ import annotations

from stretto_verify.math.extract.final import final_answer, without_frame
from stretto_verify.math.limits import LONGEST_COMPLETION, TooLong, limited_time

_SHOWN = 60  # characters of an answer


def why_wrong(completion: str, gold: str, prompt: str = "") -> str:
    r"""The reason, in one sentence, for the verdict "wrong" on a completion: the two answers, or that it has none, is
    too long, or takes too long to read.

    >>> why_wrong(r"So \boxed{43}.", "41 + 1 = 42 #### 42")
    "the final answer is '43', the gold answer '42'"
    >>> why_wrong("<think>42", "42")
    "no final answer; the gold answer is '42'"
    """
    if len(completion) > LONGEST_COMPLETION:
        return f"a completion of {len(completion):,} characters; at most {LONGEST_COMPLETION:,} are read"
    try:
        with limited_time():
            expected = _read(gold, is_all=True) or gold.strip()
            given = _read(completion, prompt)
    except TooLong:
        return "a completion that takes too long to read"
    if not given:
        return f"no final answer; the gold answer is {_cut(expected)}"
    return f"the final answer is {_cut(given)}, the gold answer {_cut(expected)}"


def _read(text: str, prompt: str = "", *, is_all: bool = False) -> str:
    found = final_answer(without_frame(text.replace("’", "'"), prompt.replace("’", "'")), is_all=is_all)
    return "" if found is None else found.text.strip()


def _cut(text: str) -> str:
    return repr(text[:_SHOWN]) + ("…" if len(text) > _SHOWN else "")
