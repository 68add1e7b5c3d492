r"""Units that nobody wrote by hand: products and quotients of units, in every spelling.

Promises: an amount is right for the same amount however its unit is written, and without its unit; it is wrong for any
other unit, be that another prefix, another power, one factor more or another side of the fraction line; degrees are not
radians; the digits of another base are another number, unless the question asks for the base.
"""

import math as numbers
from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.verify.math.judged import boxed, right

#: Symbol, word, and size: a number of units that are independent of each other. By hand, from the SI.
UNITS: Mapping[str, tuple[str, Fraction, Mapping[str, int]]] = {
    "m": ("meter", Fraction(1), {"m": 1}),
    "km": ("kilometer", Fraction(1000), {"m": 1}),
    "mm": ("millimeter", Fraction(1, 1000), {"m": 1}),
    "Mm": ("megameter", Fraction(10**6), {"m": 1}),
    "s": ("second", Fraction(1), {"s": 1}),
    "ms": ("millisecond", Fraction(1, 1000), {"s": 1}),
    "h": ("hour", Fraction(3600), {"s": 1}),
    "kg": ("kilogram", Fraction(1), {"kg": 1}),
    "mg": ("milligram", Fraction(1, 10**6), {"kg": 1}),
    "Mg": ("megagram", Fraction(1000), {"kg": 1}),
    "mol": ("mole", Fraction(1), {"mol": 1}),
    "mmol": ("millimole", Fraction(1, 1000), {"mol": 1}),
    "N": ("newton", Fraction(1), {"kg": 1, "m": 1, "s": -2}),
    "mN": ("millinewton", Fraction(1, 1000), {"kg": 1, "m": 1, "s": -2}),
    "kJ": ("kilojoule", Fraction(1000), {"kg": 1, "m": 2, "s": -2}),
    "mJ": ("millijoule", Fraction(1, 1000), {"kg": 1, "m": 2, "s": -2}),
    "MJ": ("megajoule", Fraction(10**6), {"kg": 1, "m": 2, "s": -2}),
    "mW": ("milliwatt", Fraction(1, 1000), {"kg": 1, "m": 2, "s": -3}),
    "MW": ("megawatt", Fraction(10**6), {"kg": 1, "m": 2, "s": -3}),
    "kWh": ("kilowatthour", Fraction(3_600_000), {"kg": 1, "m": 2, "s": -2}),
    "mPa": ("millipascal", Fraction(1, 1000), {"kg": 1, "m": -1, "s": -2}),
    "MPa": ("megapascal", Fraction(10**6), {"kg": 1, "m": -1, "s": -2}),
    "pA": ("picoampere", Fraction(1, 10**12), {"A": 1}),
    "mA": ("milliampere", Fraction(1, 1000), {"A": 1}),
    "MA": ("megaampere", Fraction(10**6), {"A": 1}),
    "mV": ("millivolt", Fraction(1, 1000), {"kg": 1, "m": 2, "s": -3, "A": -1}),
    "ft": ("foot", Fraction(12), {"in": 1}),
    "yd": ("yard", Fraction(36), {"in": 1}),
    "lb": ("pound", Fraction(16), {"oz": 1}),
    "oz": ("ounce", Fraction(1), {"oz": 1}),
    "gal": ("gallon", Fraction(1), {"gal": 1}),
}
Powers = dict[str, int]
#: Up to three units, each with a power.
powers = st.dictionaries(
    st.sampled_from([*UNITS]), st.sampled_from([1, 1, 1, 2, 3, -1, -1, -2]), min_size=1, max_size=3
)
chances = st.randoms(use_true_random=False)


def measure(unit: Mapping[str, int]) -> tuple[Fraction, Mapping[str, int]]:
    size, kinds = Fraction(1), dict[str, int]()
    for name, power in unit.items():
        _, own, of = UNITS[name]
        size *= own**power
        for kind, times in of.items():
            kinds[kind] = kinds.get(kind, 0) + times * power
    return size, {kind: power for kind, power in kinds.items() if power}


def spellings(unit: Mapping[str, int]) -> list[str]:
    """The unit as it is written behind a number in a box."""
    above = [(name, power) for name, power in unit.items() if power > 0]
    below = [(name, -power) for name, power in unit.items() if power < 0]
    raised = [name if power == 1 else f"{name}^{{{power}}}" for name, power in (*above, *((n, -p) for n, p in below))]
    told = [r"\ \mathrm{" + r"\,".join(raised) + "}", r"\,\mathrm{" + r" \cdot ".join(raised) + "}"]
    told.append(r"\ " + r"\,".join(rf"\text{{{name}}}" + (f"^{{{p}}}" if p != 1 else "") for name, p in unit.items()))
    if above and len(below) == 1:
        first = r"\cdot ".join(name if power == 1 else f"{name}^{power}" for name, power in above)
        name, power = below[0]
        told.append(rf"\ \mathrm{{{first}/{name}" + (f"^{power}" if power > 1 else "") + "}")
        told.append(rf"\text{{ {first}" + f"/{name}" * power + "}")
    if len(above) == len(below) == 1 and above[0][1] == below[0][1] == 1:
        told.append(rf"\text{{ {plural(above[0][0])} per {UNITS[below[0][0]][0]}}}")
    if not below and all(power == 1 for _, power in above):
        told.append(r"\text{ " + "-".join(name for name, _ in above) + "}")
    return told


def plural(name: str) -> str:
    word = UNITS[name][0]
    return {"foot": "feet"}.get(word, f"{word}s")


@settings(max_examples=60)
@given(st.integers(2, 999), powers, chances)
def test_an_amount_is_right_in_each_spelling_of_its_unit_and_alone(number: int, unit: Powers, chance: object) -> None:
    told = spellings(unit)
    gold = f"{number}{chance.choice(told)}"  # type: ignore[attr-defined]
    assert [text for text in told if not right(gold, boxed(f"{number}{text}"))] == []
    assert right(gold, boxed(number))
    assert right(number, boxed(gold))
    assert not right(gold, boxed(number + 1))


@settings(max_examples=120)
@given(st.integers(2, 999), powers, powers, chances)
def test_another_unit_is_another_amount(number: int, one: Powers, other: Powers, chance: object) -> None:
    (size, kinds), (other_size, other_kinds) = measure(one), measure(other)
    gold, answer = (f"{number}{chance.choice(spellings(unit))}" for unit in (one, other))  # type: ignore[attr-defined]
    assert right(gold, boxed(answer)) == (kinds == other_kinds and size == other_size), (gold, answer)


CHANGES = ["power", "factor", "side", "case"]


@settings(max_examples=120)
@given(st.integers(2, 999), powers, st.sampled_from([*UNITS]), st.sampled_from(CHANGES), chances)
def test_a_unit_nearly_the_same_is_another(number: int, unit: Powers, name: str, change: str, chance: object) -> None:
    one = unit
    other, first = {**one}, next(iter(one))
    if change == "power":
        other[first] += 1 if one[first] != -1 else 2
    elif change == "factor":
        other[name] = other.get(name, 0) + 1
    elif change == "side":
        other[first] *= -1
    else:
        swapped = {"m": "M", "M": "m"}.get(first[0], "") + first[1:]
        assume(swapped in UNITS and swapped not in one)
        other = {swapped if old == first else old: power for old, power in one.items()}
    other = {key: power for key, power in other.items() if power}
    assume(other and measure(one) != measure(other))
    gold, answer = (f"{number}{chance.choice(spellings(told))}" for told in (one, other))  # type: ignore[attr-defined]
    assert not right(gold, boxed(answer)), (gold, answer)


@pytest.mark.parametrize("form", [r"{}^\circ", r"{}^{{\circ}}", r"{}\text{{ degrees}}", r"\left({}\right)^\circ"])
def test_degrees_are_not_radians(form: str) -> None:
    for value in (r"\pi", r"\frac{\pi}{3}", r"2\pi", r"\frac{3\pi}{4}"):
        degrees = form.format(value)
        assert not right(value, boxed(degrees))
        assert not right(rf"{value}\text{{ rad}}", boxed(degrees))
        assert right(degrees, boxed(degrees))
    assert right(r"\pi", boxed(form.format(180)))
    assert right(form.format(r"\frac{180}{\pi}"), boxed(r"\frac{180}{\pi}"))


@settings(max_examples=30)
@given(st.integers(2, 16), st.integers(2, 9999), st.sampled_from(["_{{{}}}", r"_{{({})}}", r"\text{{ (base {})}}"]))
def test_the_digits_of_another_base_are_another_number(base: int, number: int, form: str) -> None:
    assume(base != 10)
    digits = ""
    for place in range(int(numbers.log(number, base)) + 1, -1, -1):
        digits += "0123456789ABCDEF"[number // base**place % base]
    digits = digits.lstrip("0")
    assume(digits.isdigit() and len(digits) > 1)
    based = digits + form.format(base)
    assert not right(digits, boxed(based))
    assert right(digits, boxed(based), f"Write {number} in base {base}.")
    assert not right(digits, boxed(based), f"Write {number} in base {base + 1}.")
    assert right(based, boxed(digits))
    assert right(digits, boxed(digits + form.format(10)))


@pytest.mark.parametrize(("word", "base"), [("two", 2), ("eleven", 11), ("fifteen", 15), ("sixteen", 16)])
def test_a_question_may_name_its_base_in_a_word(word: str, base: int) -> None:
    assert right("101", boxed(rf"101_{{{base}}}"), f"Write the number in base {word}.")
    assert not right("101", boxed(rf"101_{{{base}}}"), "Write the number in base twelve.")
