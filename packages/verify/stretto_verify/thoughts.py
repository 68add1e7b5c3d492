"""What a completion says when it has thought.

Models think between ``<think>`` and ``</think>``; the chat template may have opened the thought in the prompt. Nothing
in a thought is an answer, so a completion that was cut off inside of one has none.
"""

from __future__ import annotations

import re

_NAMES = "(?:think|thinking|thought|reasoning)"
_TAG = re.compile(  # in quotes it is a text
    rf"(?P<end></{_NAMES}>)|(?<![`'\"])<{_NAMES}>|<{_NAMES}>(?![`'\"])", re.IGNORECASE
)


def said(completion: str) -> str:
    """The text behind the last thought; nothing, if that one never ends.

    >>> said("<think>3 or 4</think>4"), said("3 or 4</think>4"), said("<think>3 or 4"), said("4")
    ('4', '4', '', '4')
    """
    tags = list(_TAG.finditer(completion))
    if not tags:
        return completion
    return completion[tags[-1].end() :] if tags[-1]["end"] else ""
