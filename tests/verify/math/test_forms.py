r"""Denials, boxes and subjects that nobody wrote by hand: each form with numbers, letters, sets and words in it.

Promises: a form is right for at most one gold answer, and for the one that it states; the answer that it denies,
replaces or gives to another subject is wrong; each gold answer is right for itself in its plain form.
"""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.verify.math.judged import verdict

#: A form in a line: for which of two answers it is right (- for neither), and the form.
DENIALS = r"""
- The answer is not «a».
- The answer isn't «a».
- It is not «a».
- It isn't «a»
- It cannot be «a».
- The answer can't be «a».
- The answer is never «a».
- The answer is definitely not «a».
- The answer is anything but «a».
- I doubt that the answer is «a».
- «a» is not the answer.
- «a» is wrong.
- «a» is incorrect.
- «a» does not work.
- not «a»
- <answer>not «a»</answer>
- neither «a» nor «b»
- The answer is neither «a» nor «b».
- La respuesta no es «a».
- La réponse n'est pas «a».
- Die Antwort ist nicht «a».
- A resposta não é «a».
- Ответ не «a».
- 答案不是«a»。
- «a»不是答案。
- 答えは«a»ではありません。
- not «[a]»
- It is not $«[a]»$.
- «[a]» is wrong.
- $«[a]»$ is not the answer.
- The answer cannot be «[a]».
b The answer is «b», not «a».
b The answer is not «a» but «b».
b The answer is not «a». The answer is «b».
b «a» is wrong. The answer is «b».
b It is not «a». The answer is «b».
b I thought that it is «a». No, the answer is «b».
b not «[a]» but «[b]»
b «[a]» is wrong, so «[b]».
b It is $«[b]»$, not «a».
b 答案不是«a»，答案是«b»。
b La respuesta es «b», no «a».
b La réponse est «b», pas «a».
b Die Antwort ist «b», nicht «a».
"""
BOXES = r"""
a «[a]»
a $«[a]»$.
a $$«[a]»$$
a **«[a]»**
a So the answer is $«[a]»$, as wanted.
a <answer>«[a]»</answer>
a \boxed{«[a]»}
a \boxed{\boxed{«[a]»}}
a \boxed{} «[a]»
a Put it into \boxed{}: «[a]»
a «[a]» \boxed{}
a $\boxed{\text{The answer is }«m»}$
a \boxed{\text{Answer: }«m»}
a $\boxed{ «m» }$
a \fbox{«m»}
a \boxed {«m»}
a «[a]», «[a]»
a First «b», finally «[a]».
a «[b]» Wait, «[a]».
a Is it $«[b]»$? No, $«[a]»$.
a «[b]»⏎⏎Correction: «[a]»
a «[b]» was my first guess. Actually «[a]».
a The final answer is: $«[a]»$
- «[a]» or «[b]»
- «[a]» and «[b]»
- «[a]», «[b]»
- «[a]»«[b]»
- «[a]» «[b]»
- \boxed{«m»\text{ or }«w»}
- \boxed{«m»\quad «w»}
- \boxed{«m»; «w»}
- \boxed{«[a]»«[b]»}
- \boxed{«[a]»\text{ or }«[b]»}
- \boxed{\text{not }«m»}
- \boxed{\text{not }«[a]»}
- \boxed{\text{either }«m»\text{ or }«w»}
- \boxed{\text{The answer is not }«m»}
- \boxed{\neq «m»}
- \boxed{}
"""
#: Right for the gold answer "«s» is «a»" (S), for "«a»" too (s), for neither (-); «o» is another name.
SUBJECTS = r"""
S «s» is «a»
S «s» is «a».
S So «s» is «a».
S <answer>«s» is «a»</answer>
S The answer is: «s» is «a».
S \boxed{\text{«s» is «a»}}
- «o» is «a»
- «o» is «a».
- So «o» is «a».
- <answer>«o» is «a»</answer>
- The answer is: «o» is «a».
- \boxed{\text{«o» is «a»}}
- «o»: «a»
- «o» = «a»
- «s» is «b».
- «s» is not «a».
- <answer>«s» is «b»</answer>
- \boxed{\text{«s» is «b»}}
- \boxed{\text{«s» is not «a»}}
- «s» is «a» or «b».
"""
NAMES = ["Ann", "Ben", "Tom", "Maria", "Alice", "Bob", "Carlos", "Mei", "Omar", "Priya"]
WORDS = [
    "green",
    "red",
    "blue",
    "odd",
    "convergent",
    "Paris",
    "London",
    "triangle",
    "parabola",
    "Monday",
    "Friday",
    "increasing",
]


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


def of_subjects(seed: int, wanted: int) -> Iterator[Case]:
    """Yield cases of statements about one of two subjects."""
    chance, forms = random.Random(seed), _lines(SUBJECTS)
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
    assert _faults(cases(DENIALS, seed, wanted)) == []


@pytest.mark.parametrize(("seed", "wanted"), SEEDS)
def test_of_several_boxes_one_counts_or_none(seed: int, wanted: int) -> None:
    assert _faults(cases(BOXES, seed, wanted)) == []


@pytest.mark.parametrize(("seed", "wanted"), SEEDS)
def test_a_statement_is_right_for_its_own_subject_only(seed: int, wanted: int) -> None:
    assert _faults(of_subjects(seed, wanted)) == []
