"""The verifier of mathematics, from text to verdict.

Promises: on the public cases no false accept and under 2 % false rejects; an answer is the same answer in
every frame that models put around it; a gold answer that cannot be read is undecided. (`test_pairs.py`: the rules of
docs/how_to/verify.md, both ways.)
"""

import json
from pathlib import Path

import pytest

from stretto_verify.math.reward import gold
from stretto_verify.verdicts import Undecided
from tests.verify.math.judged import verdict

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "math_cases.jsonl").read_text(encoding="utf-8").splitlines()
]


def test_no_public_case_is_accepted_falsely_and_under_two_percent_are_rejected_falsely() -> None:
    found = [(case["expected"], verdict(case["gold"], case["answer"])) for case in CASES]
    assert len(found) == 140
    assert [verdict(case["gold"], case["answer"]) for case in CASES[40::-1]] == [told for _, told in found[40::-1]]
    assert (False, "right") not in found
    assert sum(expected and told != "right" for expected, told in found) < 0.02 * len(found)


FRAMES = [
    *["{}", "${}$", r"\boxed{{{}}}", r"$\boxed{{{}}}$", r"The final answer is ${}$. I hope it is correct."],
    *[r"With $x_1 = 7$ and 12 things: \[ {} \]", "Answer: ${}$", "**Answer:** ${}$"],
    *[r"Therefore, the answer is \({}\).", "<answer>{}</answer>"],
    *[r"<think>It may be \boxed{{99}}.</think> So it is \boxed{{{}}}.", "**Final Answer**\n\\boxed{{{}}}"],
    "\\boxed{{{}}}\n\nThese are 17 more words.",
    r"\boxed{{99}} looked right, but there was a sign missing in the second of the steps, so \boxed{{{}}}",
    *["${}$<|im_end|>\n<|im_start|>user\nAnd 5?", "It is ${}$, not $99$."],
]


@pytest.mark.parametrize("frame", FRAMES)
def test_an_answer_is_found_in_every_frame(frame: str) -> None:
    for answer in ("42", r"\frac{3}{4}", "(1, 2)", r"\{3, 5\}", "x^2 + 1", "-1", r"[0, \infty)"):
        assert verdict(f"${answer}$", frame.format(answer)) == "right", answer
        assert verdict("$98$", frame.format(answer)) == "wrong", answer


def test_a_question_that_is_repeated_is_no_answer() -> None:
    prompt = r"Is it 42? Put the final answer into a box, like \boxed{42}."
    assert verdict("42", prompt, prompt) == "wrong"
    assert verdict("41", f"{prompt} It is \\boxed{{41}}. {prompt}", prompt) == "right"


BROKEN = ["", "   ", "$$", r"$\frac{1}{$", r"\frac{{{", r"$\sum_{k=1}^{10^9} \frac{1}{k^k}$", "{" * 50, "9^{9^{9^9}}"]
BROKEN += [r"2 @@ 3 \foo", "|x|" * 30 + "|", "20% up from 90", "5+3=?", "12 7/5?3"]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_gold_answer_that_cannot_be_read_is_undecided_with_a_reason(broken: str) -> None:
    with pytest.raises(Undecided, match=r"\w"):
        gold("", "", broken)
    assert verdict(broken, r"\boxed{41}") == "undecided"


def test_an_empty_answer_is_wrong() -> None:
    assert verdict("42", "") == "wrong"
