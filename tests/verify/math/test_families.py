"""Families of answers, generated: however an answer is written it is right, and a neighbour of it never is.

Promises: amounts with units, sums of money, times of day, dates, ratios, periodic solutions, systems of equations,
roots with both signs, complex numbers and polynomials are told from their neighbours;
values with names by their names, pairs from sets; what is denied, exceeded or multiplied in words is not the answer,
nor is one of several boxes, nor the right side of an equation that is written back.
"""

import re
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto_verify.math.reward import math
from tests.verify.math.judged import boxed, right
from tests.verify.tables import cases, sections

numbers = st.integers(1, 999_999)
small = st.integers(-40, 40)
positive = st.integers(1, 40)
few = settings(max_examples=6)


#: In the form of `tables.cases`: «a» to «d» are different numbers, «n» is a negative one, «a2» has two digits at least,
#: and «h» is an hour of a clock.
FAMILIES = sections("math_families.txt")


@pytest.mark.parametrize("family", FAMILIES)
@few
@given(st.lists(st.integers(2, 28), min_size=5, max_size=5, unique=True), st.integers(1, 12))
def test_an_answer_is_told_from_its_neighbours(family: str, numbers: list[int], hour: int) -> None:
    values = dict(zip("abcdn", numbers, strict=True)) | {"h": hour}
    values["n"] *= -1
    table = re.sub("«(.)(2?)»", lambda found: f"{values[found[1]]:0{found[2] or 1}}", FAMILIES[family])
    assert [case for case in cases(table) if right(*case[:2]) != case[2]] == []


NAMES = [("x", "y"), ("a", "b"), ("m", "n"), ("p", "q"), ("x_1", "x_2")]


@few
@given(small, small, st.sampled_from(NAMES))
def test_values_belong_to_their_names_in_whatever_order(one: int, other: int, names: tuple[str, str]) -> None:
    assume(one != other)
    a, b = names
    told = ["{0}={2}, {1}={3}", "$({0},{1})=({2},{3})$", "{0}={2} and {1}={3}"]
    told += [r"\begin{{cases}}{0}={2}\\{1}={3}\end{{cases}}"]
    for gold in (f"$({a},{b})=({one},{other})$", f"{a}={one}, {b}={other}", f"$({one},{other})$"):
        for form in told:
            assert right(gold, boxed(form.format(a, b, one, other)))
            assert right(gold, boxed(form.format(b, a, other, one))) == ("=" in gold or names != ("x_1", "x_2"))
            assert not right(gold, boxed(form.format(b, a, one, other)))
            assert not right(gold, boxed(form.format(a, b, other, one)))
    assert not right(f"$({a},{b})=({one},{other})$", boxed(f"u={one}, v={other}"))
    assert not right(f"{a}={one}, {b}={other}", boxed(f"{a}={one}, {other}"))


@few
@given(st.lists(st.tuples(small, small), min_size=2, max_size=3, unique=True), st.sampled_from(NAMES))
def test_points_belong_to_their_names_too(points: list[tuple[int, int]], names: tuple[str, str]) -> None:
    a, b = names
    joined, turned = ", ".join(map(str, points)), [(y, x) for x, y in points]
    for gold in (f"$({a},{b}) = {joined}$", f"${joined}$"):
        assert right(gold, boxed(f"({a},{b}) = {joined}"))
        swapped = boxed(f"({b},{a}) = {joined}")
        assert not right(gold, swapped) or sorted(points) == sorted(turned)


UNSOLVED = r"""
2x ; -x ; 5x^3+2x ; x-3 ; x^2 ; x^2+y^2 ; 3x+2y ; x+y ; x(x+1) ; x(x+y) ; \frac{x}{4} ; n! ; \frac{1}{x} ; x+x ; 2^x
e^{x} ; \sqrt{x+1} ; |x-2|+1 ; 2f(x) ; \frac{x}{2}+\frac{x}{3} ; |x| ; x^2-5x+6 ; \binom{n}{2} ; ab+bc+ca ; (a+b)(c+d)
\sin x ; AC^2 ; \log_a b
"""
LATER = ["{}", "{}\n\nIt holds.", "The answer is {}.", "So we have {}."]


@few
@given(
    small,
    st.sampled_from(re.split(" ; |\n", UNSOLVED.strip())),
    st.sampled_from(LATER),
    st.sampled_from(["=", r"\equiv"]),
)
def test_an_equation_that_is_written_back_is_not_its_right_side(value: int, left: str, frame: str, sign: str) -> None:
    assert not right(value, frame.format(boxed(f"{left} {sign} {value}")))
    assert not right(value, frame.format(f"${left} {sign} {value}$"))
    assert not right(f"$({value}, {value + 1})$", boxed(f"{left} = ({value}, {value + 1})"))


@few
@given(st.integers(2, 9), small, small, small, st.integers(1, 4))
def test_nor_is_a_polynomial_that_is_written_back(a: int, b: int, c: int, value: int, power: int) -> None:
    left = f"{a}x^{power} + {b}x + {c}".replace("+ -", "- ")
    assert not right(value, boxed(f"{left} = {value}"))
    assert not right(value, f"The equation is ${left} = {value}$.")
    assert not right(value, f"The equation is {left} = {value}.")
    assert right(value, f"From {left} = 0 we find that x = {value}.")
    assert not right(f"{value}, {value + 1}", boxed(f"{left} = {value}, {left} = {value + 1}"))


@few
@given(small, small)
def test_nor_is_a_system_of_equations_its_right_sides(one: int, other: int) -> None:
    for system in ("x+y={}, x-y={}", "x+y={}, xy={}", "2x+y={}, y={}", r"\begin{{cases}}x+y={}\\x-y={}\end{{cases}}"):
        for gold in (f"$({one},{other})$", f"$(x,y)=({one},{other})$", f"{one}, {other}"):
            assert not right(gold, boxed(system.format(one, other)))


ASKED = ["x", "f(2)", "f(g(2))", "AB", r"\angle ABC", "xy", r"\frac{AB}{CD}", "S_{10}", "P(A)", r"P(A\cap B)", "[ABC]"]
ASKED += [r"\text{Area of } ABC", r"\text{Number of 2-digit primes}", r"\lim_{x\to 0} f(x)", r"3 \oplus 4"]


@few
@given(st.integers(2, 999), st.sampled_from(ASKED))
def test_what_may_be_asked_for_has_the_value_that_it_is_said_to_have(value: int, left: str) -> None:
    assert right(value, boxed(f"{left} = {value}"))
    assert right(value, f"Therefore ${left} = {value - 1} + 1 = {value}$.")
    assert not right(value, boxed(f"{left} = {value + 1}"))


@few
@given(positive, positive, st.integers(1, 99))
def test_a_computation_is_its_result_where_it_is_right(one: int, other: int, by: int) -> None:
    assert right(one + other, boxed(f"{one} + {other} = {one + other}"))
    assert right(one * other, rf"${one} \times {other} = {one * other}$")
    assert not right(one + other + by, boxed(f"{one} + {other} = {one + other + by}"))
    assert right(one**2 + other**2, f"$a^2 + b^2 = {one}^2 + {other}^2 = {one**2 + other**2}$")


@few
@given(st.lists(small, min_size=2, max_size=4, unique=True))
def test_a_set_is_no_tuple_and_no_interval(members: list[int]) -> None:
    inside, turned = ", ".join(map(str, sorted(members))), ", ".join(map(str, sorted(members, reverse=True)))
    told = [rf"\{{{inside}\}}", rf"\{{{turned}\}}", rf"x \in \{{{inside}\}}", rf"\left\{{{inside}\right\}}"]
    low, high = min(members), max(members)
    for answer in told:
        assert not right(f"$({inside})$", boxed(answer))
        assert not right(
            f"$({low}, {high}) \\cup ({high + 1}, {high + 2})$", boxed(rf"{answer} \cup ({high + 1}, {high + 2})")
        )
        assert not right(f"${low} < x < {high}$", boxed(rf"\{{{low}, {high}\}}"))
        assert right(inside, boxed(answer))
        assert right(rf"$\{{{inside}\}}$", boxed(answer))
    assert right(rf"$\{{{inside}\}}$", boxed(" or ".join(f"x = {member}" for member in members)))
    assert right(f"$({inside})$", boxed(inside))
    assert not right(rf"$\{{{low}, {high}\}}$", boxed(rf"x \in ({low}, {high})"))


@few
@given(small, small, small, st.integers(1, 5))
def test_factored_and_expanded_polynomials(a: int, b: int, c: int, by: int) -> None:
    factored = f"(x - {a})(x - {b})(y - {c})".replace("- -", "+ ")
    expanded = f"(x^2 - {a + b}x + {a * b})(y - {c})".replace("- -", "+ ").replace("+ -", "- ")
    assert right(factored, boxed(expanded))
    assert not right(factored, boxed(f"{expanded} + {by}"))
    assert not right(factored, boxed(f"{factored} = 0"))


@few
@given(st.integers(1, 5), st.integers(1, 10**5))
def test_repeating_decimals_and_fractions(length: int, number: int) -> None:
    block = f"{number % (10**length - 1):0{length}}"
    exact = Fraction(int(block), 10**length - 1)
    gold = rf"$\frac{{{exact.numerator}}}{{{exact.denominator}}}$"
    assert right(gold, boxed(rf"0.\overline{{{block}}}"))
    assert right(gold, boxed(f"0.{block}")) == (exact == 0)


ABOUT_IT = ["more than", "less than", "greater than", "twice", "half of", "the square of", "anything but", "other than"]


@few
@given(st.integers(2, 999), st.sampled_from(ABOUT_IT))
def test_a_number_that_tells_another_one_is_not_the_answer(number: int, words: str) -> None:
    assert not right(number, f"The answer is {words} {number}.")
    assert not right(number, f"It is {words} {number}")
    assert not right(number, boxed(rf"\text{{{words} }}{number}"))


@few
@given(st.lists(numbers, min_size=2, max_size=6, unique=True), st.sampled_from(["", ", ", " or ", " and ", "; "]))
def test_many_boxes_are_not_one_of_them(guesses: list[int], between: str) -> None:
    text = between.join(map(boxed, guesses))
    assert not any(right(guess, text) for guess in guesses)


@few
@given(numbers, numbers)
def test_a_prompt_that_is_echoed_answers_nothing(one: int, other: int) -> None:
    assume(one != other)
    prompt = f"Is the answer {one}? Write it as \\boxed{{{one}}}, please."
    assert not math(prompt, prompt, str(one))
    assert not math(prompt, f"{prompt} {boxed(other)}", str(one))
    assert math(prompt, f"{boxed(other)} {prompt}", str(other))
