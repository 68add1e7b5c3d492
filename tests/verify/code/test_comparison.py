"""When an output is the expected one.

Promises: spaces at the ends of lines and empty lines at the end do not matter; zeros, indentation and runs of spaces
count where the expected text shows them; integers are exact, other numbers within a millionth and within what is shown
of them; values of different kinds are different; a tuple passes for a list and a list not for a tuple.
"""

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto_verify.code.comparison import same_text, same_value
from stretto_verify.sandbox.values import encoded, lively, plain
from tests.verify.tables import cases

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)
LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner, max_size=3)
        | st.sets(st.integers() | st.text(max_size=2), max_size=3)
    ),
    max_leaves=6,
)


TEXTS = r"""
1⏎2⏎ ✓ 1⏎2 ¦ 1·2 ✓ 1···2 ¦ 1⏎2 ✗ 1·2 ¦ 1⏎⏎2 ✗ 1⏎2 ¦ YES ✗ yes ¦ 7 ✓ 07 ✓ +7 ✗ 7.0 ¦ -0 ✗ 0 ¦ 7.0 ✓ 7 ¦ 0.5 ✓ .5 ✓ 0.50
0.333333 ✓ 0.33333300001 ✗ 0.33334 ¦ 1e3 ✓ 1000 ¦ 0.0000001 ✗ 0.0000002 ¦ 9007199254740993 ✗ 9007199254740992 ¦ 1_0 ✗ 10
١ ✗ 1 ¦ nan ✗ 0 ¦ 00101 ✓ 00101 ✗ 101 ¦ 007·1 ✗ 7·1 ¦ -01 ✗ -1 ¦ 09:05 ✗ 9:5 ¦ 00.5 ✗ 0.5 ¦ 0 ✓ 00 ¦ #07 ✗ #7 ¦ 000 ✗ 0
5000000.5 ✓ 5000000.500000 ✗ 5000000.0 ✗ 5000000 ✗ 5000000.4 ¦ 12345678.25 ✗ 12345678.0
12345678.333333 ✓ 12345678.333334 ✗ 12345678.0 ¦ 0.333333333333 ✓ 0.333333 ¦ 0.3 ✗ 0.30001 ¦ 3.14 ✗ 3.14159
1.5e10 ✓ 15000000000 ¦ 99999999.99 ✗ 100000000 ¦ 1000000.0 ✓ 1000000 ✗ 1000001 ¦ ··*⏎·***⏎***** ✓ ··*⏎·***⏎*****··⏎
✗ *⏎***⏎***** ¦ ····*⏎···*** ✓ ·*⏎*** ¦ *····* ✗ *·* ¦ *·* ✗ *····* ¦ #..#⏎#··# ✗ #..#⏎#·#
··1⏎·1·1⏎1·2·1 ✗ 1⏎1·1⏎1·2·1 ¦ a··b ✗ a·b ¦ a·b ✓ a··b ¦ if·x:⏎····y ✗ if·x:⏎y ¦ ·5 ✓ 5 ¦ 1···2 ✓ 1·2
1·2⏎3·4 ✓ ·1·2⏎3·4 ¦ /\⏎\/ ✓ /\⏎\/
"""
UNPRINTED = [
    ("1\n2", "1  \r\n2\n\n\n", True),
    ("a\tb", "a b", True),
    ("", "\n \n", True),
    ("", "x", False),
    ("x", "", False),
]
LONG = [("1" * 500, "1" * 500, True), ("1" * 500, "0" + "1" * 500, False)]


@pytest.mark.parametrize(("expected", "found", "same"), [*cases(TEXTS), *UNPRINTED, *LONG])
def test_texts(expected: str, found: str, same: bool) -> None:
    assert same_text(expected, found) is same


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        *[(2, 2, True), (2, 2.0, True), (2, 2.0000001, False), (2.0, 2, True), (1.0, 1.0000005, True)],
        *[(1.0, 1.00001, False), (1.0, 10**400, False), (1, True, False), (True, 1, False), (0, None, False)],
        *[(0, False, False), ("1", 1, False), ([1, 2], [1, 2], True), ([1, 2], [2, 1], False)],
        *[([1], [1, 1], False), ([1, 2], (1, 2), True), ((1, 2), [1, 2], False), ([[1]], ((1,),), True)],
        *[({"a": [1]}, {"a": (1,)}, True), ({"a": 1}, {"a": 1, "b": 2}, False), ({1: "x"}, {1: "x"}, True)],
        *[({1: "x"}, {"1": "x"}, False), ({1, 2}, {2, 1}, True), ({1, 2}, [1, 2], False), (b"x", b"x", True)],
        *[(b"x", "x", False), (math.nan, math.nan, True), (math.inf, math.inf, True), (math.inf, 1e308, False)],
        *[(5000000.5, 5000000.0, False), (5000000.0, 5000003, False), (1e22, 10**22, True), (0.1 + 0.2, 0.3, True)],
        *[(1 / 3, 0.333333, True), (-math.inf, math.inf, False), (10**400, 10**400, True)],
    ],
)
def test_values(expected: Any, found: Any, same: bool) -> None:
    assert same_value(plain(expected), plain(found)) is same


def test_a_flood_of_lines_costs_no_more_than_to_count_them() -> None:
    start = time.process_time()
    assert not same_text("1\n2", "\n" * (4 << 20) + "1")
    assert same_text("1", "1" + "\n" * (4 << 20))
    assert not same_text("1 " * 10, "1 " * (2 << 20))
    assert time.process_time() - start < 8.0  # a tenth of it; parsed line by line it was more


@given(JSON)
def test_a_value_is_itself(value: Any) -> None:
    assert same_value(plain(value), plain(value))


@given(LITERALS)
def test_what_is_sent_into_the_sandbox_arrives_as_it_was(value: Any) -> None:
    assert lively(plain(value)) == value


@given(JSON)
def test_results_are_written_as_the_json_module_would(value: Any) -> None:
    assert json.loads(encoded(plain(value))) == value


@given(st.integers(), st.integers(1, 10**6))
def test_no_other_integer_is_the_expected_one(value: int, off: int) -> None:
    assert not same_text(str(value), str(value + off))
    assert not same_value(value, value + off)
