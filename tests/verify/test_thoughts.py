"""What a completion says when it has thought.

Promises: nothing in a thought is an answer, for any reward that reads answers; a completion that is cut off inside of a
thought has none, whatever stands in it, and no program of it is run.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stretto_verify.code.program import extract_program
from stretto_verify.math.reward import math
from stretto_verify.thoughts import said

from stretto.rewards.functions import final_answer, last_number

PROGRAM = "```python\nprint(42)\n```\n"
TEXTS = ["= 42", r"\boxed{42}", "The answer is 42.", "<answer>42</answer>", PROGRAM, "42"]


@pytest.mark.parametrize("name", ["think", "Thinking", "thought", "reasoning"])
@pytest.mark.parametrize("text", TEXTS)
def test_an_unfinished_thought_holds_no_answer_and_no_program(text: str, name: str) -> None:
    for completion in (f"<{name}>{text}", f"<{name}>No.</{name}> Well. <{name}>{text}", f"{text}\n<{name}>or {text}"):
        assert not math("", completion, "42")
        assert not final_answer("", completion, "42")
        assert not last_number("", completion, "42")
        assert extract_program(completion) is None


@pytest.mark.parametrize("text", TEXTS)
def test_what_follows_a_thought_is_the_answer(text: str) -> None:
    for completion in (f"<think>It is 41.</think>{text}", f"It is 41.</think>{text}"):
        assert math("", completion, "42")
        assert last_number("", completion, "42")
        assert extract_program(completion) == (text if text != PROGRAM else "print(42)\n")


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", "`<think>`", "\n"]), max_size=8))
def test_nothing_is_said_before_the_last_tag(parts: list[str]) -> None:
    text = "".join(parts)
    told = said(text)
    assert text.endswith(told)
    assert "</think>" not in told
    assert re.search("(?<!`)<think>|<think>(?!`)", told) is None
