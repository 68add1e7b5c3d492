"""Questions as prompts.

Promises: a prompt says which thought its tokens leave open at their end, whether the chat template or the question has
begun it; one that speaks of thoughts, or whose template has ended them, leaves none open.
"""

import pytest

from stretto.launch.preflight.questions import encode_prompts
from stretto.model.hf.tokenizer import Tokenizer
from stretto.rollout.questions import Question
from tests.gateway.serving import tokenizer_of

CHAT = ({"role": "user", "content": "Think between <think> and </think>. How many?"},)


def tokenizer(opening: str) -> Tokenizer:
    found = tokenizer_of("qwen2_5")
    found._whole.chat_template += "{% if add_generation_prompt %}{{ '" + opening + "' }}{% endif %}"
    return found


@pytest.mark.parametrize(
    ("opening", "opens"),
    [
        ("", ""),
        ("<think>\\n", "<think>"),
        ("<think>\\n\\n</think>\\n\\n", ""),
        ("◁think▷", "◁think▷"),
        ("[THINK]", "[THINK]"),
    ],
)
def test_the_template_may_begin_a_thought(opening: str, opens: str) -> None:
    [prompt] = encode_prompts([Question("1", "How many?", "7", messages=CHAT)], tokenizer(opening), 1000)
    assert prompt.opens == opens


@pytest.mark.parametrize(("text", "opens"), [("Q: 3+4\nA: <think>\n", "<think>"), ("Write <think> first. 3+4", "")])
def test_the_question_may_begin_a_thought(text: str, opens: str) -> None:
    plain = tokenizer_of("qwen2_5")
    plain._whole.chat_template = None
    [prompt] = encode_prompts([Question("1", text, "7")], plain, 1000)
    assert prompt.opens == opens
