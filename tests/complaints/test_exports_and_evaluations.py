"""What users suffered: a trained policy is twice as large as the model that it began with, has names that nobody loads
(verl#3318, verl#4761, verl#2319, prime-rl#791, slime#2290); and the accuracy of a run is not that of the same policy
evaluated afterwards (rllm#59, prime-rl#2912, slime#2339).

Promises: a policy that a run writes has the names, types and bytes of the model at the start, and says in transformers
what it says in the engine; the evaluation of a run is, completion for completion, that of `stretto eval`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.store.series.metrics import read_metrics
from tests.launch.running import Laboratory

STEPS, HELD_OUT = 3, 24
SETTINGS = (f"trainer.steps={STEPS}", "model.build.initializer_range=0.4", f"evaluation.prompts={HELD_OUT}")


@pytest.fixture(scope="module")
def run_dir(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "run"
    laboratory.trained(folder, *SETTINGS, f"task.held_out={HELD_OUT}")
    return folder


def evaluated(laboratory: Laboratory, run_dir: Path, *overrides: str) -> tuple[dict[str, Any], dict[str, str]]:
    """What `stretto eval` finds of the last policy, and each completion by its prompt."""
    rows = run_dir.with_name("rows.jsonl")
    words: tuple[str | Path, ...] = (
        "eval", policy(run_dir), "--task", run_dir / "recipe.toml", "--rows", rows, "--json", *overrides,
    )  # fmt: skip
    out = laboratory.run(*words).well()
    results = [json.loads(line) for line in rows.read_text().splitlines()]
    return json.loads(out), {result["prompt"]: result["completions"][0] for result in results}


def policy(run_dir: Path, version: int = STEPS) -> Path:
    return run_dir / "policy" / f"v{version:06d}"


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                tensor = opened.get_tensor(name)
                found[name] = (str(tensor.dtype), tuple(tensor.shape))
    return found


def test_a_trained_policy_has_the_names_types_and_bytes_of_the_model_at_the_start(run_dir: Path) -> None:
    before, after = policy(run_dir, 0), policy(run_dir)
    assert contents(after) == contents(before) != {}
    sizes = [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in (before, after)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_the_evaluation_of_a_run_is_that_of_the_policy_afterwards(laboratory: Laboratory, run_dir: Path) -> None:
    found, completions = evaluated(laboratory, run_dir)
    _, lines = read_metrics(run_dir / "metrics.jsonl")
    assert (lines[-1].version, lines[-1].accuracy) == (STEPS, found["accuracy"])
    held_out = [json.loads(line) for line in (run_dir / "held_out.jsonl").read_text().splitlines()]
    in_run = {line["prompt"]: line["completion"] for line in held_out if line["version"] == STEPS}
    assert len(in_run) == HELD_OUT
    assert completions == in_run


def test_what_is_likeliest_in_the_engine_is_so_in_transformers(laboratory: Laboratory, run_dir: Path) -> None:
    _, completions = evaluated(laboratory, run_dir, "sampling.top_k=1")
    model: Any = AutoModelForCausalLM.from_pretrained(policy(run_dir))
    tokenizer = AutoTokenizer.from_pretrained(policy(run_dir))
    for prompt, completion in list(completions.items())[:8]:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            said = model.generate(
                ids, do_sample=False, max_new_tokens=64, attention_mask=torch.ones_like(ids), pad_token_id=0
            )
        assert tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True) == completion, prompt
