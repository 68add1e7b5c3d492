"""Thoughts: their marks, and the text of a completion without them.

Models think between two marks, such as ``<think>`` and ``</think>``. The chat template may have put the first mark at
the end of the prompt. Text inside a thought is no answer, so a completion that is cut off inside a thought has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_NAMES = ("think", "thinking", "thought", "thoughts", "reasoning", "scratchpad", "seed:think", "longcat_think")
#: Marks of the beginning and the end of a thought, in any case.
MARKS: Final = (
    *((f"<{name}>", f"</{name}>") for name in _NAMES),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    ("<|channel|>commentary<|message|>", "<|channel|>final<|message|>"),
    ("<|channel>thought", "<channel|>"),
    ("<unused94>thought", "<unused95>"),
)
#: Marks, and parts of marks, that must be decoded even if the tokenizer counts them as special tokens.
PIECES: Final = frozenset(
    {mark for pair in MARKS for mark in pair} | {"<|channel|>", "<|message|>", "<|channel>", "<unused94>"}
)
_MESSAGE = re.escape("<|message|>")


def _pattern(marks: Iterable[str], message: str) -> str:
    """Pattern for any of the marks, in which `message`, a pattern, stands for ``<|message|>``: a recipient may come
    before it, or it may be missing."""
    return "|".join(sorted({re.escape(mark).replace(_MESSAGE, message) for mark in marks}))


_ENDS = _pattern((end for _, end in MARKS), rf"[^<]{{0,60}}{_MESSAGE}")
_BEGINNINGS = _pattern((begin for begin, _ in MARKS), f"(?:{_MESSAGE})?")
_BEGINNINGS += rf"|<(?:{'|'.join(_NAMES)})\s[^<>\n]{{1,80}}>"  # with attributes
# All marks begin with a sign, so that the search skips everything else quickly.
_MARK = re.compile(f"{_ENDS}|{_BEGINNINGS}", re.IGNORECASE)
_END = re.compile(_ENDS, re.IGNORECASE)
_LAST = re.compile(rf"(?:{_BEGINNINGS})\s*\Z", re.IGNORECASE)
_LONGEST = 200  # characters at the end of a prompt that are searched for a mark
_QUOTES = "`'\""


def said(completion: str, prompt: str = "") -> str:
    """Text of a completion after its last thought; empty if that thought never ends. The end of the prompt may have
    opened a thought.

    >>> said("<think>3 or 4</think>4"), said("3 or 4</think>4"), said("<think>3 or 4"), said("4")
    ('4', '4', '', '4')
    >>> said("3 or 4", "How many? <think>"), said("4", "Think between <think> and </think>.")
    ('', '4')
    """
    last = None
    for found in _MARK.finditer(completion):
        if not _is_quoted(completion, found.start(), found.end(), is_end=_END.fullmatch(found[0]) is not None):
            last = found
    if last is None:
        return "" if opened(prompt) else completion
    return completion[last.end() :] if _END.fullmatch(last[0]) else ""


def opened(prompt: str) -> str:
    """Mark with which a prompt opens a thought at its very end; empty if there is none.

    >>> opened("So <think>\\n"), opened("So <think>\\n\\n</think>\\n"), opened("Write <think> first.")
    ('<think>', '', '')
    """
    found = _LAST.search(prompt, max(0, len(prompt) - _LONGEST))
    return found[0].rstrip() if found is not None else ""


def closed(prompt: str) -> str:
    """The prompt without a thought mark at its end.

    >>> closed("How many? <think>\\n"), closed("How many?")
    ('How many?', 'How many?')
    """
    mark = opened(prompt)
    return prompt.rstrip().removesuffix(mark).rstrip() if mark else prompt


def with_opening(completion: str, mark: str) -> str:
    """Put the thought mark `mark`, with which the prompt ends, before a completion that never ends the thought, so that
    it is not taken for an answer. Other completions are unchanged.

    >>> with_opening("3 or 4", "<think>"), with_opening("3 or 4</think>4", "<think>"), with_opening("3 or 4", "")
    ('<think>3 or 4', '3 or 4</think>4', '3 or 4')
    """
    return mark + completion if mark and not said(completion, mark) else completion


def _is_quoted(text: str, start: int, end: int, *, is_end: bool) -> bool:
    """Whether the mark ``text[start:end]`` stands between quotation marks, and so opens no thought. `is_end`: nor ends
    one, if the first of them stands behind a space or bracket: that of ``"42"</think>"42"`` closes a quotation."""
    if not (start > 0 and end < len(text) and text[start - 1] in _QUOTES and text[end] in _QUOTES):
        return False
    return not is_end or (text[end] == text[start - 1] and (start < 2 or text[start - 2] in " \n\t([{"))
