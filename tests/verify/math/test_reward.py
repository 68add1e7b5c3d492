"""The verifier of mathematics, from text to verdict.

Promises: on the public cases no false accept and under 2 % false rejects; each class of docs/how_to/verify.md is
decided by its rule, both ways; an answer is the same answer in every frame that models put around it; a denied answer
is none.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto_verify.math.reward import gold, math
from stretto_verify.verdicts import Undecided

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "math_cases.jsonl").read_text(encoding="utf-8").splitlines()
]


def verdict(expected: str, answer: str, prompt: str = "") -> str:
    try:
        return "right" if math(prompt, answer, expected) else "wrong"
    except Undecided:
        return "undecided"


def test_no_public_case_is_accepted_falsely_and_under_two_percent_are_rejected_falsely() -> None:
    found = [(case["expected"], verdict(case["gold"], case["answer"])) for case in CASES]
    assert len(found) == 140
    assert (False, "right") not in found
    assert sum(expected and told != "right" for expected, told in found) < 0.02 * len(found)


SAME = [
    # numbers
    ("1000000", "1e6"),
    ("1234567", "1,234,567"),
    ("12000", r"12{,}000"),
    ("12000", r"12\,000"),
    ("1234", "1 234"),
    ("0.5", "2/4"),
    (r"$2\frac{1}{2}$", "2 1/2"),
    (r"$-2\frac{1}{2}$", "-2.5"),
    (r"$2\times10^5$", "2e5"),
    (r"$0.\overline{3}$", "1/3"),
    ("7", "+7"),
    ("0", "-0"),
    ("4", "４"),
    ("1000.99", "1,000.99 dollars"),
    ("2", r"$5 \equiv 2 \pmod{3}$"),
    (r"$\frac{1}{2}$", r"$\frac{1}{2}$ or $0.5$"),
    # approximations of exact values
    ("1/3", "0.333333"),
    (r"$\pi$", "3.14159265"),
    # expressions
    (r"$\frac{\pi}{2}$", "pi/2"),
    (r"$-2\pi$", "-2*pi"),
    ("$e^{16}-1$", "exp(16)-1"),
    ("$14-i$", "14.0-1.0i"),
    (r"$\sqrt{\frac{1}{n}}$", r"$\frac{1}{\sqrt{n}}$"),
    (r"$\sqrt{ab}$", r"$\sqrt a\sqrt b$"),
    ("$(-1)^n$", r"$\cos(n\pi)$"),
    (r"$3\sqrt{13}$", r"$\sqrt{117}$"),
    ("$(x+1)^2$", "$x^2+2x+1$"),
    (r"$\frac{\pi}{6}+2k\pi$", r"$2\pi k+\pi/6$"),
    (r"$e^{i\pi/3}$", r"$\frac{1}{2}+\frac{\sqrt3}{2}i$"),
    (r"$\cos 60^\circ$", "1/2"),
    (r"$\sqrt[3]{-8}$", "-2"),
    # units and percent
    ("5 cm", "5"),
    ("5", "5 cm"),
    (r"15 cm^2", r"15\text{ square centimeters}"),
    ("5.50", r"\$5.50"),
    ("90", r"$90^\circ$"),
    ("28%", "28"),
    ("28%", "0.28"),
    ("0.28", r"28\%"),
    ("28.5%", "28.5 percent"),
    # names, equations
    ("5", "$x = 5$"),
    ("x=5", "5"),
    ("$2x+1$", "$y=2x+1$"),
    ("$x=1,y=2$", "$y=2,x=1$"),
    ("3x-y+13=0", "y=3x+13"),
    ("$f(x)=x+1$", "$f(n)=n+1$"),
    (r"$\sqrt{2}$", r"$\sqrt{2} \approx 1.414$"),
    # order, intervals
    (r"$\{1,2,3\}$", "3, 2 and 1"),
    (r"$\pm 3$", r"$\{-3,3\}$"),
    ("$(1,2),(3,4)$", "(3,4) and (1,2)"),
    ("[1,2]", r"$x \in [1,2]$"),
    (r"$1\le x\le 2$", "[1,2]"),
    ("$x>5$", "$5<x$"),
    ("$x>5$", r"$(5,\infty)$"),
    (r"$x<1 \text{ or } x>2$", r"$(-\infty,1)\cup(2,\infty)$"),
    (r"$(-\infty,1)\cup(2,\infty)$", r"$(2,\infty)\cup(-\infty,1)$"),
    # matrices, ratios, words, choices
    (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"$\begin{bmatrix}1\\2\end{bmatrix}$"),
    ("1:2", "2:4"),
    ("12:30", "12:30"),
    ("$1, 2, \\ldots, n$", "$1,2,\\dots,n$"),
    ("yes", "Yes."),
    ("no solution", r"\boxed{\text{No solution}}"),
    ("(C)", r"\boxed{\text{C}}"),
    ("A", r"\textbf{(A)} 5"),
    ("B", "The correct option is B."),
    ("B", "B) 12"),
]

DIFFERENT = [
    ("1000000", "1e5"),
    ("1234567", "1,234,568"),
    ("-7", "7"),
    ("17", "1 7"),
    ("1.5", "1,500"),
    ("1.0", "1,000"),
    ("0", "0.0000001"),
    ("6", "6!"),
    ("1/3", "0.33"),
    (r"$\pi$", "3.14"),
    ("0.1234567", "0.1234568"),
    ("0.0000001", "0.0000002"),
    (r"$\frac{1}{2004!}$", r"$\frac{1}{2006!}$"),
    (r"$\frac{1}{2^{99}}$", r"$\frac{1}{2^{98}}$"),
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$"),
    ("$|x|$", "$x$"),
    (r"$\sqrt{x^2}$", "$x$"),
    (r"$\frac{R}{r}$", "1"),
    (r"$\ln 2$", r"$\log 2$"),
    ("5x", "5"),
    ("5 cm", "5 m"),
    ("28%", "0.28%"),
    ("28%", "2.8"),
    ("$101_2$", "$101_3$"),
    ("x=5", "y=5"),
    ("$x=1,y=2$", "$x=2,y=1$"),
    ("$x^2+y^2=4$", "4"),
    ("3x-y+13=0", "3x+4y+14=0"),
    ("(1,2)", "(2,1)"),
    ("(1,2]", "(1,2)"),
    (r"$\{1,2,3\}$", r"$\{1,2\}$"),
    ("1331 and 1728", "1728"),
    (r"$\pm 3$", "3"),
    ("[1,2]", r"$1< x\le 2$"),
    ("$x>5$", r"$x\ge 5$"),
    ("$x>5$", r"$[5,\infty)$"),
    (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"$\begin{pmatrix}1&2\end{pmatrix}$"),
    ("12:00", "12:30"),
    ("1:2:3", "1:3:2"),
    ("$1, 2, \\ldots, n$", "$1, 3, 5, \\ldots, 2n-1$"),
    ("42", r"\boxed{\text{no solution}}"),
    ("yes", "no"),
    ("A", "B"),
]


@pytest.mark.parametrize(("expected", "answer"), SAME)
def test_the_same_answer_is_right_and_its_own_gold_answer(expected: str, answer: str) -> None:
    assert verdict(expected, answer) == "right"
    assert gold("", "", expected)


@pytest.mark.parametrize(("expected", "answer"), DIFFERENT)
def test_another_answer_is_wrong(expected: str, answer: str) -> None:
    assert verdict(expected, answer) == "wrong"


FRAMES = [
    "{}",
    "${}$",
    r"\boxed{{{}}}",
    r"$\boxed{{{}}}$",
    r"The final answer is ${}$. I hope it is correct.",
    r"With $x_1 = 7$ and 12 things: \[ {} \]",
    "Answer: ${}$",
    "**Answer:** ${}$",
    r"Therefore, the answer is \({}\).",
    "<answer>{}</answer>",
    r"<think>It may be \boxed{{99}}.</think> So it is \boxed{{{}}}.",
    "**Final Answer**\n\\boxed{{{}}}",
    "\\boxed{{{}}}\n\nThese are 17 more words.",
    r"\boxed{{99}} looked right, but there was a sign missing in the second of the steps, so \boxed{{{}}}",
    "${}$<|im_end|>\n<|im_start|>user\nAnd 5?",
    "It is ${}$, not $99$.",
]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("answer", ["42", r"\frac{3}{4}", "(1, 2)", r"\{3, 5\}", "x^2 + 1", "-1", r"[0, \infty)"])
def test_an_answer_is_found_in_every_frame(frame: str, answer: str) -> None:
    assert verdict(f"${answer}$", frame.format(answer)) == "right"
    assert verdict("$98$", frame.format(answer)) == "wrong"


@pytest.mark.parametrize(
    "answer",
    [
        "not 42",
        "The answer is not 42.",
        "It is not $42$.",
        "It can't be 42.",
        "42 is wrong.",
        "$42$ is not the answer",
        "The answer is 41, not 42.",
        "The answer is 41 rather than 42",
        "Either 41 or 42",
        "41, 42",
        r"\boxed{41} or \boxed{42}",
        r"\boxed{40}\boxed{41}\boxed{42}",
        r"\boxed{42}. Wait, that was a mistake, it must be \boxed{41}.",
        "<answer>42</answer><answer>41</answer>",
        "",
        "I do not know.",
        r"\boxed{}",
    ],
)
def test_what_is_denied_or_hedged_is_not_the_answer(answer: str) -> None:
    assert verdict("42", answer) == "wrong"


def test_a_question_that_is_repeated_is_no_answer() -> None:
    prompt = r"Is it 42? Put the final answer into a box, like \boxed{42}."
    assert verdict("42", prompt, prompt) == "wrong"
    assert verdict("41", f"{prompt} It is \\boxed{{41}}. {prompt}", prompt) == "right"


@pytest.mark.parametrize("broken", ["", "   ", "$$", r"$\frac{1}{$", r"$\sum_{k=1}^{10^9} \frac{1}{k^k}$", "{" * 50])
def test_a_gold_answer_that_cannot_be_read_is_undecided_with_a_reason(broken: str) -> None:
    with pytest.raises(Undecided, match=r"\w"):
        gold("", "", broken)
    assert verdict(broken, "41") != "right"


def test_the_same_answer_has_the_same_verdict_every_time() -> None:
    for case in CASES[:40]:
        assert len({verdict(case["gold"], case["answer"]) for _ in range(3)}) == 1
