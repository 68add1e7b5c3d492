"""Promises: text comes back as it went in; special tokens are left out, but for
those that are kept; what cannot be encoded is a named error."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from stretto.core.errors import DataError, ModelFolderError
from stretto.launch.preflight.questions import encode_demonstrations
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.rollout.questions import Question

ALPHABET = "0123456789+=?\n "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "policy"
    build_policy(BuildConfig(hidden_size=8, layers=1, heads=1, kv_heads=1, head_dim=8, alphabet=ALPHABET), path, seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def test_characters_are_tokens_in_the_order_of_the_alphabet(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("3+8=") == (5, 12, 10, 13)
    assert tokenizer.eos_token_ids == (1,)


@given(text=st.text(alphabet=ALPHABET, max_size=40))
def test_text_comes_back_as_it_went_in(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode((3, 3, 1, 0, 0)) == "11"


def test_special_tokens_that_are_kept_are_text(folder: Path, tmp_path: Path) -> None:
    whole = AutoTokenizer.from_pretrained(folder)
    whole.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "[INST]"]})
    whole.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, kept=frozenset({"[THINK]", "[/THINK]"}))
    ids = tokenizer.encode("[INST][THINK]1+1[/THINK]2")
    assert tokenizer.decode((*ids, 1)) == "[THINK]1+1[/THINK]2"
    assert tokenizer.spell(ids[:1]) == "[INST]"
    assert ids[0] in tokenizer.special_token_ids
    assert ids[1] not in tokenizer.special_token_ids


def test_a_character_outside_the_alphabet_is_a_named_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"'3x8y' cannot be encoded.*not in the vocabulary: 'x' 'y'"):
        tokenizer.encode("3x8y")


def test_a_token_for_the_unknown_is_an_error_too(folder: Path, tmp_path: Path) -> None:
    whole = AutoTokenizer.from_pretrained(folder)
    whole.add_special_tokens({"unk_token": "?"})
    whole.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"it becomes \?"):
        load_tokenizer(tmp_path).encode("1?2")


def test_a_token_for_the_unknown_that_also_begins_texts_may_begin_them(folder: Path, tmp_path: Path) -> None:
    """As in the family of GPT-2, where one token begins and ends texts and stands for the unknown."""
    whole = AutoTokenizer.from_pretrained(folder)
    whole.add_special_tokens({"unk_token": "<eos>", "bos_token": "<eos>"})
    whole.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}="
    whole.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    whole.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": "1+1"}]) == (1, 3, 12, 3, 13)
    assert tokenizer.encode("1+1=") == (1, 3, 12, 3, 13)
    assert tokenizer.encode("1<eos>1", special_tokens=False) == (3, 1, 3)
    unknowing = json.loads((tmp_path / "tokenizer.json").read_text())
    unknowing["model"]["unk_token"] = "<eos>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(unknowing))
    with pytest.raises(DataError, match=r"'3x8y' cannot be encoded.*it becomes <eos>.*not in the vocabulary: 'x' 'y'"):
        load_tokenizer(tmp_path).encode("3x8y")


def test_a_conversation_needs_a_chat_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelFolderError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "1+1"}])


def test_a_conversation_is_written_by_the_template_of_the_folder(folder: Path, tmp_path: Path) -> None:
    whole = AutoTokenizer.from_pretrained(folder)
    whole.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    whole.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_chat([{"role": "user", "content": "1+1"}]) == tokenizer.encode("1+1=")
    with pytest.raises(DataError, match="no tools"):
        tokenizer.encode_chat([{"role": "tool", "content": "2"}])


@pytest.mark.parametrize(
    ("behind", "end"), [("<end>+", "<end>"), ("<end><eos>", "<end>"), ("<eos><end>", "<eos>"), ("", "<eos>")]
)
def test_what_is_learnt_behind_a_chat_ends_as_the_template_ends_a_turn(
    folder: Path, tmp_path: Path, behind: str, end: str
) -> None:
    whole = AutoTokenizer.from_pretrained(folder)
    whole.add_special_tokens({"additional_special_tokens": ["<end>", "<start"]})  # whose end guards many a message
    whole.chat_template = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + behind + "{% endif %}{% endfor %}="
    )
    whole.save_pretrained(tmp_path)
    ids = whole.get_vocab()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, ids["<end>"]]}))
    chat = Question("chat", "", "", demonstration="2", messages=({"role": "user", "content": "1"},))
    text = Question("text", "1", "", demonstration="2")
    shown = encode_demonstrations([chat, text], load_tokenizer(tmp_path), 9)
    assert [one.completion_ids for one in shown] == [(ids["2"], ids[end]), (ids["2"], 1)]


def test_a_folder_without_a_tokenizer_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelFolderError, match="no such folder"):
        load_tokenizer(tmp_path / "nowhere")
