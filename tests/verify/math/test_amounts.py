"""Numbers in words, times of day and conversions of units. (`test_pairs.py`: amounts and the decimal comma.)

Promises: every number up to a million has one value however it is spelled, and nonsense has none; units that measure
the same convert there and back, others do not at all; a time of day is one minute of 1440, whatever clock tells it, and
a clock without its half of the day is one of two.
"""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_verify.math.compare.comparison import same_time
from stretto_verify.math.parse.measures import conversion
from stretto_verify.math.parse.numerals import counted
from stretto_verify.math.parse.reading import read
from stretto_verify.math.parse.units import amount, without_unit
from tests.verify.math.judged import right

_ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
ONES = f"{_ONES} seventeen eighteen nineteen".split()
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


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


PARTS = """
a hundred = 100, a half = 1/2, three halves = 3/2, two thirds = 2/3, five twelfths = 5/12, seven twentieths = 7/20
nine hundredths = 9/100, three and three quarters = 15/4, zero point zero five = 1/20, twelve point five = 25/2
two million three = 2000003, negative one third = -1/3
"""


@pytest.mark.parametrize("told", PARTS.strip().replace("\n", ", ").split(", "))
def test_parts_and_decimals_in_words(told: str) -> None:
    words, value = told.split(" = ")
    assert counted(words) == Fraction(value)
    assert right(value, f"The answer is {words}.")


NONSENSE = """
,a,an,and,one two,twenty eleven,hundred,ten hundred thousand hundred,one thirds,two third,thousand million,one and two
two thousand three million,point five,one point,one point ten,thirty twenty,twenty-zero-one,fifty fifty,minus,sixty-ten
"""


def test_nonsense_is_no_number() -> None:
    told = NONSENSE.strip().replace("\n", ",").split(",")
    assert dict.fromkeys(told) == {words: counted(words) for words in told}


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
