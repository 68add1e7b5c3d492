"""Gold answers with digits of other scripts are told, with count, first place and code point."""

from __future__ import annotations

from stretto.launch.preflight.odd_rows import strange_digits
from stretto.worlds.data.task import Question, Questions


def asked(*golds: str) -> Questions:
    return Questions(
        [Question(id=str(n), text="?", answer=gold, place=f"a.jsonl:{n}") for n, gold in enumerate(golds)], []
    )


def test_digits_of_full_width_are_named_with_the_first_place() -> None:
    (told,) = strange_digits(asked("12", "１２", "٣"))
    assert told.endswith("2; the first is a.jsonl:1: '１' (U+FF11)")


def test_powers_and_plain_digits_are_no_matter() -> None:
    assert strange_digits(asked("x²", "½", "12")) == []
