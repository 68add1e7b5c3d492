"""Questions as prompts.

Promises: a prompt says which thought its tokens leave open at their end, whether the chat template or the question has
begun it; one that speaks of thoughts, or whose template has ended them, leaves none open. Many that cannot be encoded
are refused in seconds, however large the vocabulary.
"""

import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from stretto.core.errors import DataError
from stretto.launch.preflight.questions import encode_prompts
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
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


def test_many_questions_with_unknown_characters_are_refused_in_seconds(tmp_path: Path) -> None:
    vocabulary = {"?": 0} | {f"a{number}": number for number in range(1, 50_000)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    questions = [Question(str(number), chr(0x4E00 + number), "7") for number in range(100)]
    began = time.monotonic()
    with pytest.raises(DataError, match=r"nor can question 1, .* and 96 more; not in the vocabulary: '一'"):
        encode_prompts(questions, load_tokenizer(tmp_path), 1000)
    assert time.monotonic() - began < 8
