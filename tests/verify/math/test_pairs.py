"""Pairs of a gold answer and an answer, as models and data sets write them, both ways.

Promises: of the pairs of tests/data/math_pairs.jsonl (numbers, units, money, times and dates, equations, intervals,
lists, vectors, expressions, choices, frames around a final answer; and beside each what is nearly the same and is not)
none is accepted falsely, and at most 2 % are rejected falsely; what has no finite value is right for no gold answer.
Every answer of tests/data/math_adversary.txt, written to be accepted falsely or beside one that was, has its verdict.
Of the pairs of tests/data/math_suites.txt, with labels of other graders' test suites, none but the disputed is accepted
falsely, and at most 2 % are rejected falsely.
Of tests/data/math_kinds.txt each form (of docs/how_to/verify.md, of another grader's suite, of a model's writing) is
read whole and is right; its neighbour, which differs by a sign, a digit, a name, a unit, a modulus, a part or a word,
is wrong, and never undecided.
"""

import json

import pytest

from stretto_verify.math.reward import gold
from stretto_verify.verdicts import Undecided
from tests.verify.math.judged import boxed, right, verdict
from tests.verify.tables import DATA, cases, sections

PAIRS = [json.loads(line) for line in (DATA / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()]
ADVERSARY = cases((DATA / "math_adversary.txt").read_text(encoding="utf-8"))
KINDS = sections("math_kinds.txt")
SUITES = sections("math_suites.txt")
#: Accepted by rules of docs/how_to/verify.md: an equation is one by its solutions where both have values.
BY_RULES = [("x=y", r"\boxed{sqrt(x)=sqrt(y)}")]
#: Not computed, since it may grow without bound: only what is written alike is right for it.
UNCHECKED = r"\sum_{i=1}^{n} a_i b_i"


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.long)])
def test_no_pair_is_accepted_falsely_and_at_most_two_percent_are_rejected_falsely(part: int) -> None:
    """Of every third pair, and in the long tests of all."""
    found = [(pair["right"], right(pair["gold"], pair["answer"])) for pair in PAIRS[::part]]
    assert len(found) > 1_900 // part
    assert (False, True) not in found
    wanted = [accepted for expected, accepted in found if expected]
    assert wanted.count(False) <= 0.02 * len(wanted)


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.long)])
def test_no_answer_of_another_suite_is_accepted_falsely_and_at_most_two_percent_are_rejected(part: int) -> None:
    told = [one for title, text in SUITES.items() if not title.startswith("disputed") for one in cases(text)][::part]
    found = [(expected, answer, is_right, right(expected, answer)) for expected, answer, is_right in told]
    assert len(found) > 850 // part
    assert [one[:2] for one in found if one[3] and not one[2] and one[:2] not in BY_RULES] == []
    wanted = [accepted for _, _, is_right, accepted in found if is_right]
    assert wanted.count(False) <= 0.02 * len(wanted)


def test_every_answer_that_is_right_has_a_gold_answer_that_can_be_read() -> None:
    refused = []
    for expected in {pair["gold"] for pair in PAIRS if pair["right"]}:
        try:
            gold("", "", expected)
        except Undecided as error:
            refused.append((expected, str(error)))
    assert refused == []


@pytest.mark.parametrize("part", [3, pytest.param(1, marks=pytest.mark.long)])
def test_answers_that_were_written_to_be_accepted_falsely_have_their_verdicts(part: int) -> None:
    """Every third one, and in the long tests all."""
    told = [(gold, answer, verdict(gold, answer)) for gold, answer, _ in ADVERSARY[::part]]
    assert len(ADVERSARY) > 2_600
    assert [
        one for one, (_, _, is_right) in zip(told, ADVERSARY[::part], strict=True) if (one[2] == "right") != is_right
    ] == []


@pytest.mark.parametrize("title", KINDS)
def test_each_answer_is_right_or_wrong_as_it_should_be(title: str) -> None:
    told = cases(KINDS[title])
    assert [(one, answer) for one, answer, right in told if verdict(one, answer) != ("wrong", "right")[right]] == []
    assert all(gold("", "", one) for one, _, _ in told if one != UNCHECKED)


NO_VALUE = [r"\ln 0", r"\log_0 5", r"\frac{1}{0}", r"\tan 90^\circ", r"\infty-\infty", r"\frac{0}{0}", r"e^{1/0}"]
NO_VALUE += [r"\cos(\ln 0)", r"\frac{1}{\ln 0}", "NaN", r"\csc 0", r"\frac{x}{0}", r"\Gamma(0)", "42&43", "42|43"]


EXPECTED = ["42", "0", "1", "x", "(1,2)", "[1,2]", r"\{1,2\}", r"\sqrt2", "x>3", r"\infty"]
#: Each of the ones for three of the others; all pairs in the long tests.
AGAINST = [
    pytest.param(expected, degenerate, marks=[] if (row + column) % 3 == 0 else [pytest.mark.long])
    for row, degenerate in enumerate(NO_VALUE)
    for column, expected in enumerate(EXPECTED)
]


@pytest.mark.parametrize(("expected", "degenerate"), AGAINST)
def test_what_has_no_finite_value_answers_nothing(expected: str, degenerate: str) -> None:
    assert not right(expected, boxed(degenerate))
    assert not right(expected, f"The answer is ${degenerate}$.")
