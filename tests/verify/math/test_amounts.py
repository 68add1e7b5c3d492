"""Numbers in words, times of day, conversions of units and the decimal comma.

Promises: every number up to a million has one value however it is spelled, and nonsense has none; units that measure
the same convert there and back, others do not at all; a time of day is one minute of 1440, whatever clock tells it, and
a clock without its half of the day is one of two; a comma is a point where a list would be odd, and else a list.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_verify.math.compare.times import same_time
from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.reading import read
from stretto_verify.math.parse.units import amount, conversion, without_unit
from stretto_verify.math.reward import math
from stretto_verify.verdicts import Undecided

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
ONES += ["seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def right(gold: str, completion: str) -> bool:
    try:
        return math("", completion, gold)
    except Undecided:
        return False


def spelled(number: int, hyphen: str = "-", joint: str = " and ") -> str:
    """A number below a million in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (hyphen + ONES[number % 10] if number % 10 else "")
    large, word = (1000, "thousand") if number >= 1000 else (100, "hundred")
    above, below = divmod(number, large)
    rest = (joint if below < 100 else " ") + spelled(below, hyphen, joint) if below else ""
    return f"{spelled(above, hyphen, joint)} {word}{rest}"


@given(st.integers(0, 999_999), st.sampled_from("- "), st.sampled_from([" and ", " "]))
def test_a_number_in_words_has_its_value(number: int, hyphen: str, joint: str) -> None:
    words = spelled(number, hyphen, joint)
    assert counted(words) == number
    assert counted(f"minus {words.upper()}") == -number


def test_every_number_up_to_a_thousand_has_words_of_its_own() -> None:
    assert [counted(spelled(number)) for number in range(1001)] == list(range(1001))


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("a hundred", "100"),
        ("a half", "1/2"),
        ("three halves", "3/2"),
        ("two thirds", "2/3"),
        ("five twelfths", "5/12"),
        ("seven twentieths", "7/20"),
        ("nine hundredths", "9/100"),
        ("three and three quarters", "15/4"),
        ("zero point zero five", "1/20"),
        ("twelve point five", "25/2"),
        ("two million three", "2000003"),
        ("negative one third", "-1/3"),
    ],
)
def test_parts_and_decimals_in_words(words: str, value: str) -> None:
    assert counted(words) == Fraction(value)
    assert right(value, f"The answer is {words}.")


@pytest.mark.parametrize(
    "words",
    [
        "",
        "a",
        "an",
        "and",
        "one two",
        "twenty eleven",
        "hundred",
        "ten hundred thousand hundred",
        "one thirds",
        "two third",
        "thousand million",
        "two thousand three million",
        "point five",
        "one point",
        "one point ten",
        "thirty twenty",
        "twenty-zero-one",
        "one and two",
        "fifty fifty",
        "minus",
        "sixty-ten",
    ],
)
def test_nonsense_is_no_number(words: str) -> None:
    assert counted(words) is None


LIKE = {
    "length": ["mm", "cm", "m", "km"],
    "long": ["in", "ft", "yd", "mi"],
    "mass": ["mg", "g", "kg"],
    "time": ["s", "min", "h", "d", "week"],
    "money": ["cent", "dollar"],
}
KINDS = {unit: kind for kind, units in LIKE.items() for unit in units}


def test_units_convert_there_and_back_if_they_measure_the_same() -> None:
    for unit, other in product(KINDS, KINDS):
        there, back = conversion(unit, other), conversion(other, unit)
        assert (there is not None) == (back is not None) == (KINDS[unit] == KINDS[other])
        assert there is None or back is None or there * back == 1


@pytest.mark.parametrize(
    ("unit", "other", "ratio"),
    [
        *[("km", "m", "1000"), ("h", "s", "3600"), ("week", "d", "7"), ("ft", "in", "12"), ("dollar", "cent", "100")],
        *[("m^3", "cm^3", "1000000"), ("km/h", "m/s", "5/18"), ("m/s", "km/h", "18/5"), ("g/cm^3", "kg/m^3", "1000")],
        *[("m^2", "cm", None), ("m", "ft", None), ("km/h", "km", None), ("apple", "pear", None), ("m^2", "m^3", None)],
    ],
)
def test_powers_and_quotients_of_units_convert_by_their_parts(unit: str, other: str, ratio: str | None) -> None:
    assert conversion(unit, other) == (None if ratio is None else Fraction(ratio))


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        *[("5 m", r"\boxed{500\text{ cm}}", True), ("5 m", r"\boxed{5\text{ cm}}", False)],
        *[("90 minutes", "The answer is 1.5 hours.", True), ("1 h 30 min", r"\boxed{90\text{ minutes}}", True)],
        *[("1 h 30 min", r"\boxed{90}", False), ("36 km/h", r"\boxed{10 \text{ m/s}}", True)],
        *[("2 m^2", r"\boxed{20000\text{ cm}^2}", True), ("2 m^2", r"\boxed{200\text{ cm}^2}", False)],
        *[("3 kg", r"\boxed{3\text{ m}}", False), ("3", r"\boxed{3\text{ m}}", True), ("3 apples", "3 pears", True)],
    ],
)
def test_an_amount_in_another_unit(gold: str, completion: str, expected: bool) -> None:
    assert right(gold, completion) == expected


def test_an_amount_of_two_units_is_told_from_the_large_one_to_the_small() -> None:
    assert amount("2 feet 3 inches") == ("27", "in and more")
    assert [amount(text) for text in ("3 inches 2 feet", "2 feet 3 minutes", "2 feet")] == [None] * 3
    assert without_unit(r"7\text{ cm}^2") == ("7", "cm^2")
    assert without_unit("7ab") == ("7ab", "")


def clock(minute: int) -> list[str]:
    """The ways in which a minute of the day is told with its half."""
    hour, rest = divmod(minute, 60)
    half, shown = "ap"[hour >= 12], (hour - 1) % 12 + 1
    told = [f"{shown}:{rest:02} {half}.m.", rf"{shown}:{rest:02}\text{{ {half.upper()}M}}"]
    told += [f"{shown} {half}m"] if rest == 0 else []
    return told + ([f"{hour}:{rest:02}"] if not 1 <= hour <= 12 else [])


@given(st.integers(0, 1439), st.integers(0, 1439))
def test_a_time_of_day_is_one_minute_of_it(one: int, other: int) -> None:
    for gold, given_ in product(clock(one)[:2], clock(other)):
        assert same_time(read(gold), read(given_)) == (one == other)


@given(st.integers(0, 1439))
def test_a_clock_without_its_half_of_the_day_is_one_of_two(minute: int) -> None:
    hour, rest = divmod(minute % 720, 60)
    plain = read(f"{hour or 12}:{rest:02}")
    assert same_time(read(clock(minute)[0]), plain) is True
    assert same_time(read(clock((minute + 720) % 1440)[0]), plain) is True
    assert same_time(read(clock((minute + 1) % 1440)[0]), plain) is False


def test_what_is_no_time_of_day_is_compared_otherwise() -> None:
    assert [same_time(read(text), read("5:00 PM")) for text in ("13:00 PM", "5:75", "1:2", "5")] == [None] * 4
    assert same_time(read("5:00"), read("17:00")) is None  # two ratios


@pytest.mark.parametrize(
    ("gold", "completion", "expected"),
    [
        *[("2.75", r"\boxed{2{,}75}", True), ("2.75", r"\boxed{2,75}", True), ("2.75", "The answer is 2,75.", True)],
        *[("2.75", r"\boxed{2,76}", False), ("275", r"\boxed{2,75}", False), ("1000.99", r"\boxed{1000,99}", True)],
        *[("0.111", r"\boxed{0,111}", True), ("1.05", r"\boxed{1,05}", True), ("1000", r"\boxed{1,000}", True)],
        *[("1", r"\boxed{1,000}", False), ("(3,5)", r"\boxed{3,5}", True), ("3, 5", r"\boxed{3,5}", True)],
        *[("3.5", r"\boxed{3,5}", True), ("35", r"\boxed{3,5}", False), ("7/2", r"\boxed{3,5}", False)],
        *[("2.5", r"\boxed{2,5,1}", False), ("1234.5", r"\boxed{1.234,5}", False)],
    ],
)
def test_a_comma_is_a_point_where_a_list_would_be_odd(gold: str, completion: str, expected: bool) -> None:
    assert right(gold, completion) == expected


@pytest.mark.parametrize(
    ("product", "value", "wrong"),
    [
        *[(r"3\binom{4}{2}", "18", "9"), (r"63 \binom{64}{2}+1", "127009", "2080")],
        *[
            (r"2\left(\frac{1}{2}\right)", "1", "5/2"),
            (r"(3)\frac{1}{2}", "3/2", "7/2"),
            (r"3\frac{1}{2}", "7/2", "3/2"),
        ],
    ],
)
def test_a_mixed_number_is_a_number_before_a_fraction_and_nothing_else(product: str, value: str, wrong: str) -> None:
    assert right(product, rf"\boxed{{{value}}}")
    assert right(value, rf"\boxed{{{product}}}")
    assert not right(product, rf"\boxed{{{wrong}}}")
    assert not right(wrong, rf"\boxed{{{product}}}")
