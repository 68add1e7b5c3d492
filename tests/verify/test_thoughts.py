"""What a completion says when it has thought.

Promises: nothing in a thought is an answer, for any reward that reads answers, with any marks; a completion that is cut
off inside of a thought has none, whatever stands in it, and no program of it is run; so is one whose prompt has begun
the thought, which a prompt that speaks of marks has not.
"""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.rewards.functions import exact_match, final_answer, last_number
from stretto_verify.code.program import extract_program
from stretto_verify.math.reward import math
from stretto_verify.thoughts import MARKS, closed, opened, said, with_opening

PROGRAM = "```python\nprint(42)\n```\n"
TEXTS = ["= 42", r"\boxed{42}", "The answer is 42.", "<answer>42</answer>", PROGRAM, "42"]
REWARDS = (math, final_answer, last_number, exact_match)


@pytest.mark.parametrize("name", ["think", "Thinking", "thought", "reasoning"])
@pytest.mark.parametrize("text", TEXTS)
def test_an_unfinished_thought_holds_no_answer_and_no_program(text: str, name: str) -> None:
    for completion in (f"<{name}>{text}", f"<{name}>No.</{name}> Well. <{name}>{text}", f"{text}\n<{name}>or {text}"):
        assert not any(reward("", completion, "42") for reward in REWARDS)
        assert extract_program(completion) is None


@pytest.mark.parametrize("text", TEXTS)
def test_what_follows_a_thought_is_the_answer(text: str) -> None:
    for completion in (f"<think>It is 41.</think>{text}", f"It is 41.</think>{text}"):
        assert math("", completion, "42")
        assert last_number("", completion, "42")
        assert extract_program(completion) == (text if text != PROGRAM else "print(42)\n")


def _prompts(begin: str) -> list[tuple[str, bool]]:
    """Prompts, and whether they have begun a thought."""
    return [
        *[("How many?", False), (f"Think between {begin} and its end.", False)],
        *[(f"How many? Think behind '{begin}'", False), (f"{begin}", True)],
        *[(f"<|im_start|>assistant\n{begin}\n", True), (f"Think behind {begin}.\nAssistant: {begin} ", True)],
    ]


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_every_mark_of_a_thought_in_every_place(begin: str, end: str) -> None:
    for (prompt, by_prompt), by_completion, is_closed, inside, text in itertools.product(
        _prompts(begin), (False, True), (False, True), ("It may be 41", *TEXTS), (*TEXTS, "")
    ):
        if is_closed and not (by_prompt or by_completion):
            continue
        completion = f"{begin if by_completion else ''}{inside}\n{end if is_closed else ''}{text}"
        is_open = (by_prompt or by_completion) and not is_closed
        assert said(completion, prompt) == ("" if is_open else text if is_closed else completion)
        if is_open:
            assert not any(reward(prompt, completion, "42") for reward in REWARDS)
            assert extract_program(said(completion, prompt)) is None
        elif text:
            assert math(prompt, completion, "42")
            assert last_number(prompt, completion, "42")


@pytest.mark.parametrize(("begin", "end"), MARKS)
def test_a_completion_within_its_prompts_thought_shows_it(begin: str, end: str) -> None:
    for prompt, by_prompt in _prompts(begin):
        mark = opened(prompt)
        assert bool(mark) == by_prompt
        assert opened(closed(prompt)) == ""
        assert said(with_opening("so it is 42", mark)) == ("" if by_prompt else "so it is 42")
        assert with_opening(f"41{end}42", mark) == f"41{end}42"


def test_a_channel_may_say_to_whom_it_goes_or_be_cut_off_in_its_name() -> None:
    begun = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>42"
    assert said(begun) == said("<|channel|>analysis") == ""
    assert said(f"{begun}<|channel|>final json<|message|>43") == "43"


def test_a_quoted_mark_ends_no_thought_and_a_mark_may_have_attributes() -> None:
    for quoted in ("'</think>'", '"</think>"', "(`</think>`)"):
        assert said(f"<think>I close it with {quoted}, then 42") == said(f"Then {quoted} 42", "So <think>\n") == ""
    assert said('<think>It is "42"</think>"42"') == '"42"'
    assert said("<think type='x'>42") == said("42", "So <THINK effort=high>\n") == ""
    assert said("<think type='x'>41</think>42") == "42"


@given(st.lists(st.sampled_from(["<think>", "</think>", "x", "`<think>`", "\n"]), max_size=8))
def test_nothing_is_said_before_the_last_tag(parts: list[str]) -> None:
    text = "".join(parts)
    told = said(text)
    assert text.endswith(told)
    assert "</think>" not in told
    assert re.search("(?<!`)<think>|<think>(?!`)", told) is None


def test_a_long_completion_is_read_in_time() -> None:
    for piece in ("<think", "<|channel|>final ", "<|channel|>analysis", "<", "[THINK] ", "\n"):
        said(piece * (400_000 // len(piece)))
        opened(piece * (400_000 // len(piece)))
