"""Compare times of day: ``5:00 PM`` equals ``5 p.m.`` and ``17:00``. One side may omit AM or PM."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stretto_verify.math.parse.structure import Node, Ratio, Scalar, Words

_TOLD = re.compile(r"([0-9]{1,2})(?:\s*:\s*([0-9]{2}))?\s*([ap])\s*\.?\s*m\.?", re.IGNORECASE)
_TEXTS = re.compile(r"\\text\{([^{}]*)\}")
_NOON = 12 * 60


@dataclass(frozen=True)
class Time:
    """Time of day in minutes since midnight. `sure`: whether it is known to be AM or PM."""

    minutes: int
    sure: bool


def same_time(gold: Node, answer: Node) -> bool | None:
    """Whether two times of day are the same. If AM or PM is unknown on one side, the times may differ by twelve hours.
    None if one is no time, or neither is written with AM or PM."""
    one, other = _time(gold), _time(answer)
    if one is None or other is None or not (isinstance(gold, Words) or isinstance(answer, Words)):
        return None
    if one.sure and other.sure:
        return one.minutes == other.minutes
    return one.minutes % _NOON == other.minutes % _NOON


def _time(given: Node) -> Time | None:
    match given:
        case Words(text=text) if (told := _TOLD.fullmatch(_TEXTS.sub(r" \1 ", text).strip())) is not None:
            hour, minute = int(told[1]), int(told[2] or 0)
            if not (1 <= hour <= 12 and minute < 60):
                return None
            return Time(60 * (hour % 12) + minute + _NOON * (told[3].lower() == "p"), sure=True)
        case Ratio(parts=(Scalar(latex=hours), Scalar(latex=minutes))):
            is_time = hours.isdigit() and minutes.isdigit() and len(minutes) == 2
            if not is_time or int(hours) > 23 or int(minutes) > 59:
                return None
            return Time(60 * int(hours) + int(minutes), sure=not 1 <= int(hours) <= 12)
    return None
