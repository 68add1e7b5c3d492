r"""Denials, boxes, subjects and qualifiers that nobody wrote by hand: each form with numbers, letters, sets, words.

Promises: a form is right for at most one gold answer, and for the one that it states; the answer that it denies,
replaces or gives to another subject is wrong; a number that words or signs beside it make another one ("42 plus 3",
"the supplement of 42") is wrong, and right beside words that only tell what it is; each gold answer is right for itself
in its plain form.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.verify.math.judged import verdict
from tests.verify.tables import sections

#: Denials and boxes: before each form, for which of two answers, «a» and «b», it is right (- for neither).
#: Behind and before a number: it stays the answer (a) or not (-), nor with a noun between the two (n).
#: Subjects: right for the gold answer "«s» is «a»" (S), for "«a»" too (s), for neither (-); «o» is another name.
FORMS = sections("math_forms.txt")
NAMES = ["Ann", "Ben", "Tom", "Maria", "Alice", "Bob", "Carlos", "Mei", "Omar", "Priya"]
WORDS = ["green", "red", "blue", "odd", "convergent", "Paris", "London", "triangle", "parabola", "Monday", "Friday"]
WORDS += ["increasing"]


class Case(NamedTuple):
    """A completion, and the gold answers for which it is judged, with whether it is right for each."""

    completion: str
    golds: tuple[tuple[str, bool], ...]


def _number(chance: random.Random) -> str:
    large, small = chance.randrange(11, 9999), chance.randrange(2, 99)
    return chance.choice([f"{large}", f"-{small}", f"{large}.{small}", rf"\frac{{{2 * small + 1}}}{{{2 * 64}}}"])


def _set(chance: random.Random) -> str:
    one, other = chance.randrange(2, 99), chance.randrange(100, 999)
    return chance.choice([rf"\{{{one}, {other}\}}", f"({other}, {one})", f"[{one}, {other})"])


KINDS: dict[str, Callable[[random.Random], str]] = {
    "number": _number,
    "letter": lambda chance: chance.choice("ABCDE"),
    "set": _set,
    "word": lambda chance: chance.choice(WORDS),
}


def _pair(kind: str, chance: random.Random) -> tuple[str, str]:
    one = other = KINDS[kind](chance)
    while other == one:
        other = KINDS[kind](chance)
    return one, other


def _written(form: str, one: str, other: str, kind: str) -> str:
    inner = [rf"\text{{{name}}}" if kind in ("word", "letter") else name for name in (one, other)]
    said = [f"${name}$" if kind == "set" or "\\" in name else name for name in (one, other)]
    for place, name in (("«a»", said[0]), ("«b»", said[1]), ("«m»", inner[0]), ("«w»", inner[1])):
        form = form.replace(place, name)
    for place, name in (("«[a]»", inner[0]), ("«[b]»", inner[1])):
        form = form.replace(place, rf"\boxed{{{name}}}")
    return form.replace("⏎", "\n")


def _lines(table: str) -> list[tuple[str, str]]:
    return [(line[0], line[2:]) for line in table.strip().split("\n")]


def cases(table: str, seed: int, wanted: int) -> Iterator[Case]:
    """Yield cases of each form in turn, with a pair of one kind."""
    chance, forms = random.Random(seed), _lines(table)
    for number in range(wanted):
        mark, form = forms[number % len(forms)]
        kind = chance.choice([*KINDS])
        one, other = _pair(kind, chance)
        golds = ((one, mark == "a"), (other, mark == "b"))
        yield Case(_written(form, one, other, kind), golds)


#: Where a number and what stands behind it may be written, and a number and what stands before it.
BEHIND = [r"\boxed{«a»} «q»", r"So it is $\boxed{«a»}$ «q».", "The answer is «a» «q».", "So it is «a» «q».", "«a» «q»"]
BEHIND += ["<answer>«a» «q»</answer>", "#### «a» «q»", "**Answer: «a»** «q»", "Therefore, we get $«a»$ «q»."]
BEFORE = [r"So it is «q» $\boxed{«a»}$.", "The answer is «q» «a».", "So it is «q» «a».", "<answer>«q» «a»</answer>"]
BEFORE += ["#### «q» «a»", "Therefore, we get «q» $«a»$.", r"\boxed{\text{«q» } «a»}"]
NOUNS = [" cm", " apples", " dollars", " square meters"]


def of_qualifiers(part: str, frames: list[str], seed: int, wanted: int) -> Iterator[Case]:
    """Yield numbers with each qualifier of a part of the table in turn, in one of the frames."""
    chance, forms = random.Random(seed), _lines(FORMS[part])
    for number in range(wanted):
        mark, form = forms[number % len(forms)]
        one, other = chance.sample(range(11, 999), 2)
        frame = frames[number // len(forms) % len(frames)]
        if mark == "n" and chance.random() < 0.5:
            form = f"{chance.choice(NOUNS)} {form}"
        text = frame.replace("«q»", form).replace("«a»", str(one)).replace("«b»", str(other))
        for space in (" ,", " .", " %", " -t"):
            text = text.replace(space, space[1:])
        yield Case(text.replace("  ", " "), ((str(one), mark == "a"),))


def of_subjects(seed: int, wanted: int) -> Iterator[Case]:
    """Yield cases of statements about one of two subjects."""
    chance, forms = random.Random(seed), _lines(FORMS["subjects"])
    for number in range(wanted):
        mark, form = forms[number % len(forms)]
        kind = chance.choice(["number", "word"])
        one, other = (name.replace("\\", "") for name in _pair(kind, chance))
        if "{" in one + other:
            one, other = "17", "18"
        name, stranger = chance.sample(NAMES, 2)
        gold = f"{name} is {one}"
        text = form.replace("«s»", name).replace("«o»", stranger).replace("«a»", one).replace("«b»", other)
        yield Case(text, ((gold, mark == "S"), (f"{stranger} is {other}", False), (f"{name} is {other}", form in ALSO)))


#: Forms that state the other answer of the same subject.
ALSO = ("«s» is «b».", "<answer>«s» is «b»</answer>", r"\boxed{\text{«s» is «b»}}")
SEEDS = [(11, 700), *[pytest.param(seed, 11_700, marks=pytest.mark.long) for seed in (4_000_037, 77_000_001, 9_001)]]


def _faults(found: Iterator[Case]) -> list[tuple[str, str, str]]:
    return [
        (case.completion, gold, told)
        for case in found
        for gold, is_right in case.golds
        if (told := verdict(gold, case.completion)) != ("right" if is_right else "wrong")
    ]


@pytest.mark.parametrize(("seed", "wanted"), SEEDS)
def test_what_is_denied_is_wrong_and_what_is_given_in_its_place_is_right(seed: int, wanted: int) -> None:
    assert _faults(cases(FORMS["denials"], seed, wanted)) == []


@pytest.mark.parametrize(("seed", "wanted"), SEEDS)
def test_of_several_boxes_one_counts_or_none(seed: int, wanted: int) -> None:
    assert _faults(cases(FORMS["boxes"], seed, wanted)) == []


@pytest.mark.parametrize(("seed", "wanted"), SEEDS)
def test_a_statement_is_right_for_its_own_subject_only(seed: int, wanted: int) -> None:
    assert _faults(of_subjects(seed, wanted)) == []


@pytest.mark.parametrize(("seed", "wanted"), SEEDS)
def test_a_number_that_words_beside_it_change_is_wrong_and_beside_other_words_right(seed: int, wanted: int) -> None:
    assert _faults(of_qualifiers("behind", BEHIND, seed, wanted)) == []
    assert _faults(of_qualifiers("before", BEFORE, seed, wanted)) == []
