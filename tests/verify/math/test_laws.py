"""Laws of the verifier, with answers that nobody wrote by hand.

Promises: a changed answer is never right (a digit, a sign, the end of an interval, a member of a list, the order of a
tuple, a cell of a matrix); another spelling of the same answer is right.
"""

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stretto_verify.math.reward import math
from tests.verify.math import judged
from tests.verify.math.judged import boxed

integers = st.integers(-(10**6), 10**6)
small = st.integers(-99, 99)
decimals = st.decimals(-1000, 1000, allow_nan=False, allow_infinity=False, places=4)


def right(gold: object, answer: object) -> bool:
    return judged.right(gold, boxed(answer))


@given(integers, integers)
def test_integers(one: int, other: int) -> None:
    assert right(one, one)
    assert right(one, f"{one:,}")
    assert right(f"${one}$", f"x = {one}")
    assert right(one, f"{one}.0")
    assert right(one, other) == (one == other)


@given(decimals, st.integers(0, 30), st.integers(1, 9))
def test_a_digit_that_is_changed_is_another_number(number: object, place: int, by: int) -> None:
    text = str(number)
    at = place % len(text)
    assume(text[at].isdigit())
    changed = text[:at] + str((int(text[at]) + by) % 10) + text[at + 1 :]
    assume(float(changed) != float(text))
    assert right(text, text)
    assert not right(text, changed)


@given(small, st.integers(1, 99), small, st.integers(1, 99))
def test_fractions(above: int, below: int, other_above: int, other_below: int) -> None:
    spelled = rf"\frac{{{above}}}{{{below}}}"
    equal = above * other_below == other_above * below
    assert right(f"${spelled}$", f"{above}/{below}")
    assert right(f"${spelled}$", rf"\dfrac{{{3 * above}}}{{{3 * below}}}")
    assert right(f"${spelled}$", rf"\frac{{{other_above}}}{{{other_below}}}") == equal


@given(st.lists(small, min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False), st.integers(1, 9))
def test_a_set_is_its_members_and_a_tuple_their_order(members: list[int], chance: object, by: int) -> None:
    shuffled = [*members]
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    joined, other = ", ".join(map(str, members)), ", ".join(map(str, shuffled))
    assert right(rf"$\{{{joined}\}}$", rf"\{{{other}\}}")
    assert right(f"$({joined})$", f"({other})") == (members == shuffled)
    changed = [members[0] + 200 * by, *members[1:]]
    assert not right(rf"$\{{{joined}\}}$", rf"\{{{', '.join(map(str, changed))}\}}")
    assert not right(rf"$\{{{joined}\}}$", rf"\{{{', '.join(map(str, members[1:]))}\}}")


@given(small, st.integers(1, 50), st.sampled_from("(["), st.sampled_from(")]"), st.sampled_from("(["))
def test_an_interval_is_its_ends_and_whether_they_belong_to_it(
    low: int, length: int, opening: str, closing: str, other: str
) -> None:
    high = low + length
    gold = f"${opening}{low}, {high}{closing}$"
    assert right(gold, rf"x \in {opening}{low},{high}{closing}")
    assert right(gold, f"{other}{low}, {high}{closing}") == (other == opening)
    assert not right(gold, f"{opening}{low}, {high + 1}{closing}")
    signs = {"(": "<", "[": r"\le", ")": "<", "]": r"\le"}
    assert right(f"${low} {signs[opening]} x {signs[closing]} {high}$", f"{opening}{low}, {high}{closing}")


@given(st.tuples(small, small, small, small), st.integers(0, 3), st.integers(1, 9))
def test_a_matrix_is_its_cells(cells: tuple[int, int, int, int], at: int, by: int) -> None:
    changed = [*cells]
    changed[at] += by
    form = r"\begin{{pmatrix}}{} & {} \\ {} & {}\end{{pmatrix}}"
    assert right(f"${form.format(*cells)}$", form.format(*cells).replace("pmatrix", "bmatrix"))
    assert not right(f"${form.format(*cells)}$", form.format(*changed))


@settings(max_examples=10)
@given(small, small, small)
def test_a_polynomial_is_its_coefficients(a: int, b: int, c: int) -> None:
    expanded = f"x^2 + {a + b}x + {a * b}".replace("+ -", "- ")
    assert right(f"$(x + {a})(x + {b})$".replace("+ -", "- "), expanded)
    assert right(f"${expanded}$", expanded.replace("x^2", "x^2 + 0")) or a + b == 0
    assert right(f"$x^2 + {a}x + {b}$".replace("+ -", "- "), f"x^2 + {a}x + {c}".replace("+ -", "- ")) == (b == c)


@given(st.integers(1, 99), st.integers(1, 99))
def test_a_percentage_is_a_number_or_its_hundredth(one: int, other: int) -> None:
    assert right(rf"${one}\%$", f"{one} percent")
    assert right(rf"${one}\%$", one)
    assert right(one / 100, rf"{one}\%")
    assert right(rf"${one}\%$", rf"{other}\%") == (one == other)


@given(integers, integers)
def test_what_is_denied_is_not_right(one: int, other: int) -> None:
    assume(one != other)
    assert not math("", f"The answer is not {one}.", str(one))
    assert not math("", f"It is {other}, not {one}.", str(one))
    assert math("", f"The answer is {other}, not {one}.", str(other))
