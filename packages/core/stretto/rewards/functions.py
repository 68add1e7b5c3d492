"""Interface of reward functions, and the simplest built-in rewards: comparisons of texts and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

from stretto_verify.thoughts import opened, said
from stretto_verify.verdicts import Undecided as Undecided

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")
_DECIMAL = r"[+-]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(_DECIMAL)
_GOLD_NUMBER = re.compile(rf"(?:\\?\$ ?)?({_DECIMAL})(?: ?\\?%)?\.?")  # $18 and 50% are 18 and 50
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


#: Judges one completion; called as ``function(prompt, completion, answer)`` with three strings.
#:
#: `prompt` is the question as text, `completion` what the policy generated (special tokens removed), `answer` the gold
#: answer of the data row. Further named parameters get the row's other fields of these names; ``**fields`` gets all
#: other fields. The function may be asynchronous; its worker still judges one completion at a time.
#:
#: Returns True or False for right and wrong (worth ``rewards.right`` and ``rewards.wrong``), or a finite number that is
#: the reward itself. With a number, the completion counts as right if it lies above the middle of the two.
#:
#: Any other result, or a number beyond ±1e6, makes the completion *undecided*: it is not trained on, and never scored
#: zero. The same holds if the function raises `Undecided` or another exception, or runs longer than
#: ``rewards.timeout``.
RewardFunction = Callable[[str, str, str], float | bool]


def final_answer(prompt: str, completion: str, answer: str) -> bool:
    """Whether the text after the last ``=`` (all text without one) is the gold answer; thoughts are removed first.
    Integers are compared as numbers, anything else as text.

    >>> final_answer("3+8+5=", "3+8=11;11+5=16", "16"), final_answer("3+8+5=", "3+8=11;11+5=16=", "16")
    (True, False)
    """
    return behind_the_last_sign(prompt, completion) == _canonical(answer)


def behind_the_last_sign(prompt: str, completion: str) -> str:
    """The text after the last ``=`` (all text without one), normalized and without thoughts, as `final_answer` compares
    it; "" if there is none. Two completions with the same text are the same answer."""
    return _canonical(said(completion, prompt).rpartition("=")[2])


def exact_match(prompt: str, completion: str, answer: str) -> bool:
    """Whether the completion is the gold answer, apart from surrounding spaces. If the prompt opens a thought, a
    completion without text after the thought is wrong."""
    return completion.strip() == answer.strip() and not (opened(prompt) and not said(completion, prompt))


def last_number(prompt: str, completion: str, answer: str) -> bool:
    """Whether the last number of the completion (``-12``, ``3.50``, ``1,000``) equals that of the gold answer; thoughts
    are removed first. False if the completion has no number.

    >>> last_number("How many?", "First 3, then 4.50", "4.5"), last_number("How many?", "none", "4.5")
    (True, False)
    >>> last_number("How many?", "48 + 24 = 72", "He sold 48 + 24 = <<48+24=72>>72 clips.\\n#### 72")
    True

    Raises:
        Undecided: the gold answer is no number.
    """
    gold = _number_of(answer)
    return number_of_completion(prompt, completion) == gold


def number_of_completion(prompt: str, completion: str) -> str | None:
    """The last number of the completion, normalized, as `last_number` compares it (thoughts are removed first); None if
    there is none."""
    numbers = _NUMBER.findall(said(completion, prompt))
    return _canonical_decimal(numbers[-1]) if numbers else None


def number_gold(prompt: str, completion: str, answer: str) -> bool:
    """Check that `answer` can be a gold answer of `last_number`; returns True. The other arguments are not read. Raises
    Undecided, with the reason, if `answer` holds no number."""
    return bool(_number_of(answer))


def _number_of(gold: str) -> str:
    r"""The number in a gold answer, normalized: after ``####`` (GSM8K), in ``\boxed{}``, or the whole text. Raises
    Undecided if that is no number."""
    final = gold.rpartition("####")[2]
    boxes = _BOXED.findall(final)
    match = _GOLD_NUMBER.fullmatch((boxes[-1] if boxes else final).strip())
    if match is None:
        raise Undecided(f"the gold answer {gold[-60:]!r} is not a number, and has none after '####'")
    return _canonical_decimal(match[1])


def _canonical(text: str) -> str:
    """Normalize a text: integers lose leading zeros and a plus sign, other text loses surrounding spaces.

    Works on the text, because converting a hostile completion of a million digits to an integer takes long.
    """
    text = text.strip()
    match = _INTEGER.fullmatch(text)
    if match is None:
        return text
    sign = "-" if match[1] == "-" and match[2] != "0" else ""
    return sign + match[2]


def _canonical_decimal(text: str) -> str:
    """Normalize the text of a decimal number, without the commas between its thousands: ``+1,234.50`` becomes
    ``1234.5``, ``4.0`` becomes ``4``, ``-.0`` becomes ``0``."""
    whole, _, fraction = text.strip().replace(",", "").partition(".")
    digits = _canonical(whole.lstrip("+-") or "0")
    number = f"{digits}.{fraction}".rstrip("0").rstrip(".") if fraction else digits
    return f"-{number}" if whole.startswith("-") and number != "0" else number
