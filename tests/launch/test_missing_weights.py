"""A weight that may have another name in its folder is missed when the folder is loaded: one message, exit code 2. A
config with GPT-2's names trains as any other. A run's first policy is on disk before its digests are.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from stretto.launch.assemble import supervised
from stretto.launch.assemble.supervised import copy_policy
from stretto.launch.recipe.recipe import load_recipe
from stretto.model.hf.build import build_policy
from stretto.store.series.metrics import read_metrics
from tests.launch.running import TINY, Laboratory, assert_the_law
from tests.tiny_policy import TINY as POLICY


def with_a_folder(recipe: Path) -> Path:
    """The tiny recipe, with the folder "policy" beside it as its model."""
    text, _, rest = TINY.read_text().partition("[model.build]")
    recipe.write_text(f'{text}[model]\npath = "policy"\n[task]{rest.partition("[task]")[2]}')
    return recipe


def test_a_weight_that_nobody_has_is_named_once(laboratory: Laboratory, tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "policy", tmp_path / "run"
    build_policy(POLICY, folder, seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["extra.weight"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ended = laboratory.run("train", with_a_folder(tmp_path / "recipe.toml"), "--run-dir", run_dir)
    ended.refused("lacks the weight model.norm.weight")
    assert ended.err.count("model.norm.weight") == 1
    assert len(ended.err.splitlines()) == 1


def test_a_model_with_the_names_of_gpt2_is_trained(laboratory: Laboratory, tmp_path: Path) -> None:
    folder, run_dir, built = tmp_path / "policy", tmp_path / "run", load_recipe(TINY).model.build
    assert built is not None
    build_policy(built, folder, seed=1)
    torch.manual_seed(1)
    shape = GPT2Config(vocab_size=len(built.vocabulary), n_embd=32, n_layer=2, n_head=2, bos_token_id=None)
    shape.n_positions, shape.eos_token_id, shape.pad_token_id = built.context_length, 1, 0
    GPT2LMHeadModel(shape).save_pretrained(folder)
    laboratory.trained(run_dir, "trainer.steps=4", recipe=with_a_folder(tmp_path / "recipe.toml"))
    assert all(proof.proven for proof in assert_the_law(run_dir).canary_proofs)
    steps, _ = read_metrics(run_dir / "metrics.jsonl")
    apart = [step.trainer.get("behavior_logprob_error") for step in steps]
    assert max(one for one in apart if one is not None) < 1e-4
    assert all(step.trainer["grad_norm"] for step in steps)


def test_the_first_policy_is_on_disk_before_its_digests_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that has lost its power, no checkpoint is of use without it."""
    synced, by_then = list[Path](), list[str]()
    monkeypatch.setattr(supervised, "sync", synced.append)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").touch()
    copy_policy(tmp_path / "policy", tmp_path / "v000000", lambda part: by_then.extend(path.name for path in synced))
    assert by_then == ["model.safetensors", ".v000000.part"]
    assert synced[2:] == [tmp_path]
