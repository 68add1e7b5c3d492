r"""Kinds of final answers that other graders' suites and the writing of models have in common, one gold each."""

from __future__ import annotations

import pytest

from stretto_verify.math.reward import math
from stretto_verify.verdicts import Undecided

RIGHT = [
    # A value and its approximation, in signs or words.
    ("1/6", "The probability is 1/6 (about 0.167)."),
    (r"\sqrt{2}", r"\boxed{\sqrt{2} \text{ (approximately 1.414)}}"),
    (r"\sqrt{2}", "The answer is √2, which is approximately 1.414."),
    (r"\frac{1}{6}", r"\boxed{\frac{1}{6} \text{ or about } 16.67\%}"),
    # A reason in brackets.
    ("5", "The answer is 5 (since 2+3 = 5)."),
    ("42", r"\boxed{42 \text{ (since 6*7=42)}}"),
    # A sign of conclusion in front.
    ("12", "=> 12"),
    ("12", "→ 12"),
    ("12", r"\boxed{\therefore 12}"),
    # JSON, quotes, a colon of another script, an escaped dollar sign, a line break of LaTeX.
    ("5", '{"reasoning": "2+3", "answer": "5"}'),
    ("5", "Answer: '5'"),
    ("5", "故答案为：5"),
    ("15", "**Answer:**\nJessica has **\\$15** more."),
    ("12", r"\boxed{12\\}"),
    ("5", "The answer to 2+3 is 5."),
    ("5", "I got 5."),
    # Fonts, names of functions, ordinals, units.
    ("1/2", r"\boxed{\mathbf{\frac{1}{2}}}"),
    ("5", r"\boxed{\mathbf 5}"),
    ("-5", r"\boxed{\text{-}5}"),
    ("42", r"\boxed{\operatorname{lcm}(6,7)}"),
    ("5", r"\boxed{5^{\text{th}}}"),
    (r"\sqrt[3]{2}", r"\boxed{\sqrt[3] 2}"),
    ("1/3", "⅓"),
    ("1/2", "1⁄2"),
    (r"5\text{ m/s}", r"\boxed{5\ \text{m}\cdot\text{s}^{-1}}"),
    ("5", "USD 5"),
    # Names: a constant of integration, the integer of a period, an inverse function, a derivative.
    (r"\frac{x^3}{3} + C", r"\boxed{\frac{1}{3}x^3 + c}"),
    (r"x = \frac{\pi}{4} + k\pi", r"\boxed{x = \frac{\pi}{4} + n\pi}"),
    ("5", r"\boxed{f^{-1}(2) = 5}"),
    (r"\frac{dy}{dx} = 2x", r"\boxed{2x}"),
    # Ranges: two bounds, a half line, a membership as the gold answer.
    ("0 < x < 3", r"\boxed{x > 0 \text{ and } x < 3}"),
    ("-1<x<=2", "x<=2 and x>-1"),
    (r"(0, \infty)", r"\boxed{\mathbb{R}^+}"),
    (r"[0, \infty)", r"\boxed{\mathbb{R}_{\ge 0}}"),
    (r"x \in (0, 3)", r"\boxed{0 < x < 3}"),
    # Words: a list in any order, a limit that is missing.
    (r"\text{Alice and Bob}", r"\boxed{\text{Bob and Alice}}"),
    ("DNE", r"\boxed{\text{does not exist}}"),
    (r"\text{No solution}", "The equation has no solution."),
    ("D", "I would choose D."),
    # Points with a name, brackets of less and greater, a membership by two equations, the function of a line.
    ("(2,3)", r"\boxed{A(2,3)}"),
    ("(2,3)", r"\boxed{\text{vertex } (2,3)}"),
    (r"\langle 1,2 \rangle", "<1,2>"),
    ("2,3", r"\boxed{x=2 \lor x=3}"),
    ("y = 2x + 1", "f(x) = 2x+1"),
    ("5", r"\boxed{5^\circ\text{C}}"),
    ("5", r"\boxed{\text{exactly } 5}"),
    # A question mark, which is no sign of mathematics; a dollar sign by its name; a value in a box of words.
    *[("20", text) for text in ("20?", r"\boxed{20?}", "The answer is 20?", "#### 20?", "Is it 20? Yes.")],
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}?}"),
    ("loss of $1000", r"\boxed{\text{loss of \textdollar 1000}}"),
    (r"loss of \textdollar 1000", r"\boxed{1000}"),
    *[
        ("$1000", text)
        for text in (r"\textdollar{}1000", r"\boxed{\text{a loss of }\$1000}", r"It is \textdollar1000.")
    ],
    ("42", r"\boxed{\text{a total of }42\text{ apples}}"),
    # Shares.
    ("68% of 250.00", r"\boxed{170}"),
    ("170", r"\boxed{68\%\text{ of }250}"),
    ("60", "It is 2/3 of 90."),
    ("72", "It is 20% off 90."),
    # The final box.
    ("34", r"first \boxed{12}; final \boxed{34}"),
]
WRONG = [
    ("5", "5 or about 9"),
    ("42", "42 or about 41"),
    ("42", "This is not the final answer: 42"),
    ("42", "Wrong answer: 42"),
    ("42", r"Final answer: 0\$42"),
    ("7", "The number is 7 (about 42)."),
    ("42", "The number is 7 (about 42)."),
    ("0.167", "The probability is 1/6 (about 0.167)."),
    ("12", r"first \boxed{12}; final \boxed{34}"),
    ("42", r"\boxed{41\text{ (since 42 is too much)}}"),
    ("42", r"\boxed{0\text{ }42}"),
    ("42", r"A \Rightarrow 42"),
    ("0 < x < 3", r"\boxed{x > 0 \text{ or } x < 3}"),
    ("0 < x < 3", r"\boxed{x > 0 \text{ and } y < 3}"),
    ("0 < x < 3", r"\boxed{x > 3 \text{ and } x < 0}"),
    (r"x \in (0, 3)", r"\boxed{0 < y < 3}"),
    (r"(0, \infty)", r"\boxed{\mathbb{R}_{\ge 0}}"),
    (r"A + C", r"\boxed{A + c}"),
    (r"\frac{x^3}{3} + C", r"\boxed{\frac{1}{3}x^3}"),
    (r"k\pi", r"\boxed{2k\pi}"),
    (r"\frac{\pi}{4} + k\pi", r"\boxed{\frac{\pi}{4} + 2n\pi}"),
    (r"\text{Alice and Bob}", r"\boxed{\text{Alice and Carol}}"),
    ("5", r"\boxed{x^{-1}(2) = 5}"),
    ("A", r"\boxed{A(2,3)}"),
    ("B(2,3)", r"\boxed{A(2,3)}"),
    ("y = 2x + 1", "g(x) = 2x+1"),
    ("42", r"\boxed{x=0 \land y=42}"),
    ("5", '{"answer": "6", "next": "5"}'),
    ("20", "20!?"),
    ("20", "20 = ?"),
    ("8", r"\boxed{5+3=?}"),
    *[("42", text) for text in ("The answer is 42? No.", r"\boxed{42}? No, it is less.", r"\boxed{42? 43}")],
    ("2", r"\boxed{\text{loss of \textdollar 2 or \textdollar 3}}"),
    ("-1000", r"\boxed{\text{loss of \textdollar 1000}}"),
    *[("42", rf"\boxed{{\text{{{words} }}42}}") for words in ("not", "log of", "twice", "more than", "option A")],
    ("20", r"\boxed{\text{June 20}}"),
    *[(gold, "It is 20% of 90.") for gold in ("90", "20%", "20")],
    ("250", "68% of 250.00 is 170"),
    *[(gold, "It is 20% off 90.") for gold in ("90", "18", "20%")],
]


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_a_form_that_is_read_whole_is_right(gold: str, completion: str) -> None:
    assert math("", completion, gold)


@pytest.mark.parametrize("gold", ["20% up from 90", "5+3=?", "12 7/5?3"])
def test_a_gold_answer_that_is_not_read_whole_is_undecided(gold: str) -> None:
    with pytest.raises(Undecided):
        math("", "90", gold)


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_its_neighbour_is_wrong(gold: str, completion: str) -> None:
    assert not math("", completion, gold)
