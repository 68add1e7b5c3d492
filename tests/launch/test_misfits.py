"""Promises about models that a make of server would compute otherwise than the trainer: they are refused before a
process starts, with the key, its value, what is allowed and a remedy; and nothing else is refused. The laws go over
every family that a make is known for."""

import re
from pathlib import Path
from typing import Any

import pytest

import stretto
from stretto.core.errors import RecipeError
from stretto.engine.config import CAPABILITIES
from stretto.launch.preflight.plan import make_plan
from stretto.launch.recipe.recipe import Recipe, validate
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import inspect_model_folder
from stretto_servers.keys import check_model, check_window
from tests.tiny_policy import TINY, make_of_family

#: What a family needs beside the shape of a small llama.
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen2_moe": {"use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 0},
    "qwen3_moe": {"use_sliding_window": True, "max_window_layers": 0, "num_experts": 2, "num_experts_per_tok": 1},
}
WINDOW = 24
FAMILIES = [(make, family) for make, of in CAPABILITIES.items() for family in of.without_window]
HEADS = [(make, family) for make, of in CAPABILITIES.items() for family in of.without_head]


def folder_of(folder: Path, family: str, **config: Any) -> Path:
    build_policy(TINY, folder, seed=1)
    make_of_family(folder, family, {"sliding_window": None} | SPECIAL.get(family, {}) | config, TINY, seed=1)
    return folder


def recipe_of(policy: Path, kind: str, max_tokens: int = 64) -> Recipe:
    tree = {
        "model": {"path": str(policy)},
        "task": {"kind": "arithmetic", "operands_max": 3, "held_out": 16, "prompts": 64, "demonstrations": 0},
        "trainer": {},
        "sampling": {"max_tokens": max_tokens},
        "evaluation": {"prompts": 8},
        "engine": {"kind": kind, "addresses": ["127.0.0.1:1"]} if kind != "native" else {},
    }
    return validate(tree, "recipe.toml")


def refused(recipe: Recipe) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        make_plan(recipe)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("make", "family"), FAMILIES)
def test_a_window_that_a_make_lacks_is_refused_for_longer_sequences(tmp_path: Path, make: str, family: str) -> None:
    base = inspect_model_folder(folder_of(tmp_path / "policy", family, sliding_window=WINDOW))
    recipe = recipe_of(base.path, make)
    check_window(recipe, base, WINDOW)
    check_window(recipe_of(base.path, "native"), base, WINDOW + 1)
    with pytest.raises(RecipeError) as caught:
        check_window(recipe, base, WINDOW + 1)
    (told,) = str(caught.value).splitlines()
    assert told.startswith(
        f"{base.path}: sliding_window: 24, and {CAPABILITIES[make].name} computes {family!r} without"
    )
    assert "up to 25 tokens; allowed: sequences of up to 24 tokens" in told
    assert told.endswith('or another engine.kind, such as "native"')


@pytest.mark.parametrize(("make", "family"), FAMILIES)
def test_a_model_of_the_same_family_without_a_window_is_taken(tmp_path: Path, make: str, family: str) -> None:
    off = {"use_sliding_window": False} if "use_sliding_window" in SPECIAL.get(family, {}) else {}
    base = inspect_model_folder(folder_of(tmp_path / "policy", family, **off))
    check_window(recipe_of(base.path, make), base, TINY.context_length)


@pytest.mark.parametrize("make", sorted(CAPABILITIES))
def test_a_window_that_a_make_computes_is_taken(tmp_path: Path, make: str) -> None:
    base = inspect_model_folder(folder_of(tmp_path / "policy", "gemma3_text", sliding_window=WINDOW))
    check_window(recipe_of(base.path, make), base, TINY.context_length)


@pytest.mark.parametrize(("make", "family"), HEADS)
def test_an_output_matrix_that_a_make_skips_is_refused(tmp_path: Path, make: str, family: str) -> None:
    base = inspect_model_folder(folder_of(tmp_path / "untied", family, tie_word_embeddings=False))
    check_model(recipe_of(base.path, "native"), base)
    told = refused(recipe_of(base.path, make))
    name = CAPABILITIES[make].name
    found = (
        f"{base.path}: tie_word_embeddings: false, and {name} takes the output matrix of {family!r} from the embedding"
    )
    assert told == [f'{found}; allowed: true; or another engine.kind, such as "native"']
    with pytest.raises(RecipeError, match=re.escape(found)):
        stretto.Engine.load(base.path, kind=make, addresses=["127.0.0.1:1"], deadlines={"start": 3.0})
    tied = inspect_model_folder(folder_of(tmp_path / "tied", family, tie_word_embeddings=True))
    check_model(recipe_of(tied.path, make), tied)


def test_a_plan_counts_the_tokens_of_prompt_and_completion(tmp_path: Path) -> None:
    policy = folder_of(tmp_path / "policy", "mistral", sliding_window=WINDOW)
    (told,) = refused(recipe_of(policy, "sglang", max_tokens=WINDOW))
    assert told.startswith(f"{policy}: sliding_window: 24, and SGLang computes 'mistral' without it; sequences have up")
    (told,) = refused(recipe_of(policy, "sglang", max_tokens=8))  # 6 tokens of a prompt at most, and 8
    assert told.startswith("engine.addresses: ")
