r"""Notations of programs, symbols of units, and sentences inside a box: each with a neighbour that is wrong."""

from __future__ import annotations

import pytest

from stretto_verify.math.reward import math

RIGHT = [
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "Matrix([[1, 2], [3, 4]])"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{[1, 2; 3, 4]}"),
    ("(1,2)", r"\boxed{(1, 2)^T}"),
    ("3+4i", r"\boxed{3+4j}"),
    ("(-4-2j)", r"\boxed{-4 - 2i}"),
    ("x=1,y=2", "{'x': 1, 'y': 2}"),
    ("1000000", "1_000_000"),
    ("1/3", "0.(3)"),
    ("June 5", "5th of June"),
    ("(1,2),(3,4)", "x=1,y=2 or x=3,y=4"),
    ("(1,2),(3,4)", "[(1,2),(3,4)]"),
    ("{1,2}", r"\boxed{\{2,1,2\}}"),
    ("x > 3", "{x | x > 3}"),
    ("10", r"\boxed{5C2}"),
    (r"|x|", r"\boxed{\abs{x}}"),
    (r"\emptyset", "the empty set"),
    (r"\infty", r"\boxed{Infinity}"),
    # Units.
    ("2", "Answer: 2 kPa"),
    ("2 kPa", r"\boxed{2}"),
    ("2", "2 mol/L"),
    ("5 meters", "five meters"),
    ("90", "90º"),
    # Marks of emphasis, of a sentence's end, of a conclusion.
    ("120", "The answer is _120°_."),
    ("42", "The answer is <b>42</b>."),
    ("unknown", r"\boxed{unknown?}"),
    ("new york city", "<answer>New York City!</answer>"),
    ("42", r"\boxed{Therefore, 42}"),
    # A sentence in a box.
    ("9", r"\boxed{The smallest positive integer \(N\) with this property is \(9\).}"),
    ("9", r"\boxed{We get 9.}"),
    ("B", r"\boxed{Option B}"),
    ("42", r"\boxed{答案：42}"),
]
WRONG = [
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "Matrix([[1, 3], [2, 4]])"),
    ("(1,2)", r"\boxed{(2,1)^T}"),
    ("3+4i", r"\boxed{3+4k}"),
    ("4i", r"\boxed{4j}"),
    ("x=1,y=2", "{'x': 2, 'y': 1}"),
    ("1000", "1_00"),
    ("5", "5th of June"),
    ("(1,2)", "x=1,y=2 or x=3,y=4"),
    ("1,1,2", r"\boxed{\{1,2\}}"),
    ("(1,2)", "{1,2}"),
    ("3", "{x | x > 3}"),
    (r"\infty", r"\boxed{negative infinity}"),
    ("2 mW", "2 MW"),
    ("2 kPa", "2 MPa"),
    ("2", "2 MN"),
    ("2", "2 B"),
    ("5 seconds", "five meters"),
    ("120", "5?"),
    ("2", "x_2_"),
    ("41", "<b>41</b>, <b>42</b>"),
    ("9", r"\boxed{The statement discusses \(9\) possibilities.}"),
    ("42", r"\boxed{Is it 42?}"),
    ("42", r"\boxed{The answer is 41 or 42.}"),
    ("42", r"\boxed{The answer is not 42.}"),
    ("42", r"\boxed{Option B is 42 and option C is 43}"),
    ("B", r"\boxed{Option B or C}"),
    ("42", r"\boxed{答案是41，不是42}"),
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_another_notation_of_the_same_answer_is_right(gold: str, completion: str) -> None:
    assert math("", completion, gold)


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_its_neighbour_is_wrong(gold: str, completion: str) -> None:
    assert not math("", completion, gold)
