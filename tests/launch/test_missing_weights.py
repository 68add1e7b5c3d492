"""A weight that may have another name in its folder is missed when the folder is loaded: one message, exit code 2."""

from pathlib import Path

from safetensors.torch import load_file, save_file

from stretto.model.hf.build import build_policy
from tests.launch.running import TINY, Laboratory
from tests.tiny_policy import TINY as POLICY


def test_a_weight_that_nobody_has_is_named_once(laboratory: Laboratory, tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "policy", tmp_path / "run"
    build_policy(POLICY, folder, seed=1)
    weights = load_file(folder / "model.safetensors")
    weights["extra.weight"] = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text, _, rest = TINY.read_text().partition("[model.build]")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'{text}[model]\npath = "policy"\n[task]{rest.partition("[task]")[2]}')
    ended = laboratory.run("train", recipe, "--run-dir", run_dir)
    ended.refused("lacks the weight model.norm.weight")
    assert ended.err.count("model.norm.weight") == 1
    assert len(ended.err.splitlines()) == 1
