"""Promises: a new policy is a Hugging Face folder like any other; equal seeds give equal weights; shapes that cannot
be are refused."""

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.core.errors import RecipeError
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import inspect_model_folder
from tests.tiny_policy import TINY

SMALL = {"hidden_size": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate_size": 24}


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen2", False), ("llama", True), ("llama", False)])
def test_transformers_loads_what_was_built(tmp_path: Path, family: str, tied: bool) -> None:
    config = BuildConfig.model_validate(
        {**SMALL, "family": family, "alphabet": "01+=", "context_length": 32, "tie_embeddings": tied}
    )
    build_policy(config, tmp_path / "policy", seed=1)
    folder = inspect_model_folder(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert (folder.vocab_size, folder.context_length) == (6, 32)
    assert (folder.layers, folder.kv_heads, folder.head_dim) == (2, 1, 8)
    assert folder.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert folder.dtype == "float32"
    assert tokenizer("1+0=")["input_ids"] == [3, 4, 2, 5]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1


def test_equal_seeds_give_equal_weights_and_leave_torchs_own_randomness_alone(tmp_path: Path) -> None:
    config = BuildConfig.model_validate(SMALL)
    torch.manual_seed(5)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        build_policy(config, tmp_path / name, seed)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "kv_heads = 2 does not divide heads = 3"),
        ({"alphabet": "0120"}, "alphabet holds '0' more than once"),
        ({"alphabet": ""}, "at least 1 character"),
        ({"head_dim": 7}, "multiple of 2"),
        ({"family": "gpt2"}, "'qwen3', 'qwen2' or 'llama'"),
        ({"width": 4}, "Extra inputs"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        BuildConfig.model_validate(wrong)


def test_a_model_that_the_memory_has_no_room_for_is_refused_before_it_is_built(tmp_path: Path) -> None:
    large = TINY.model_copy(update={"hidden_size": 2**20, "intermediate_size": 2**20, "layers": 1})
    with pytest.raises(RecipeError, match=r"^model\.build: a model of 12,\d+\.\d+ GiB in float32, and "):
        build_policy(large, tmp_path / "model", seed=1)
