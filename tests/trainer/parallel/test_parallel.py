"""Promises of ranks that divide the matrices of a layer, the tokens of a row, or both:

- losses and weights are those of one rank, with a critic, a reference, an entropy bonus, adapters, a selection;
- every rank holds its part, fills it from the folder, and sees the same losses and the same policy;
- a policy has the bytes of one that a single rank has written, and any number of ranks goes on from a checkpoint;
- a model that does not divide is refused, with the numbers and those that do.

Two ranks are in every test run, four (FSDP beside, and both at once) in the long one.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto.core.errors import RecipeError
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.optimizer import Learner
from stretto.trainer.ranks import ALONE
from stretto_cluster.ranks.matrices import refuse_undividable
from tests.model.families import EXPERTS, SLIDING, config
from tests.tolerances import EXACT, after_adam, operations
from tests.trainer.parallel.runs import FIRST, PLAYED, played, scored, settled
from tests.trainer.rank_runs import trainer_of
from tests.trainer.several_ranks import run_program
from tests.trainer.unloaded import held_by, save

FAMILIES: dict[str, dict[str, Any]] = {
    FIRST: {},
    "qwen2": {},  # biases
    "gemma3_text": {"sliding_window": 7, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
    "phi3": {"pad_token_id": 0},  # one matrix for query, key and value
}
RUNS = [(count, name) for count, scenarios in PLAYED.items() for name in scenarios]
BACKWARD = operations(48, 2, backward=True)


def several(count: int, *rest: Any) -> Any:
    return pytest.param(count, *rest, marks=[pytest.mark.long] if count > 2 else [])


COUNTS = [several(count) for count in PLAYED]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and a checkpoint of one rank."""
    folder = tmp_path_factory.mktemp("parallel")
    for number, (family, special) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        AutoModelForCausalLM.from_config(config(family, 8, 4, special)).save_pretrained(folder / "models" / family)
    trainer = alone(folder, 2, "matrices")
    trainer.train(PLAYED[2]["matrices"].batch(0))
    trainer.save_checkpoint(folder / "1-checkpoint")
    torch.save(dict(trainer.full_parameters()), folder / "1.pt")
    return folder


def loaded(folder: Path) -> Any:
    return load_policy(folder, attention=PACKED_ATTENTION)


def alone(folder: Path, count: int, name: str) -> Any:
    """The trainer of one rank."""
    return trainer_of(settled(PLAYED[count][name], 1), ALONE, partial(loaded, folder / "models" / FIRST))


@pytest.fixture(scope="module")
def seen(models: Path) -> Any:
    """What a rank of so many saw."""
    ran = set[int]()

    def of(count: int, rank: int = 0) -> dict[str, Any]:
        if count not in ran:
            run_program("tests.trainer.parallel.runs", models, str(count))
            ran.add(count)
        found: dict[str, Any] = torch.load(models / f"{count}-{rank}.pt", weights_only=False)
        return found

    return of


@pytest.mark.parametrize(("count", "name"), [several(*run) for run in RUNS])
def test_the_losses_and_weights_are_those_of_one_rank(models: Path, seen: Any, count: int, name: str) -> None:
    scenario = settled(PLAYED[count][name], 1)
    one, together = played(scenario, alone(models, count, name)), seen(count)[name]
    tolerance = after_adam(scenario.steps * 2, BACKWARD)
    assert tolerance < 1e-4
    for ours, theirs in zip(together["metrics"], one["metrics"], strict=True):
        assert ours == {key: pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in theirs.items()}
    assert together["weights"].keys() == one["weights"].keys()
    for key, weight in one["weights"].items():
        torch.testing.assert_close(together["weights"][key], weight, rtol=0, atol=tolerance, msg=key)


@pytest.mark.parametrize(("count", "name"), [several(*run) for run in RUNS])
def test_all_ranks_see_the_same(seen: Any, count: int, name: str) -> None:
    first, *others = (seen(count, rank)[name] for rank in range(count))
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert all(torch.equal(other["weights"][key], weight) for key, weight in first["weights"].items())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_fill_and_score_what_a_folder_holds(models: Path, seen: Any, count: int, family: str) -> None:
    learner = Learner(loaded(models / "models" / family), TrainerConfig())
    whole, (held, logprobs) = held_by(learner.model, ALONE), seen(count)["filled"][family]
    assert whole.keys() == held.keys()
    assert all(torch.equal(held[name], one) for name, one in whole.items())
    torch.testing.assert_close(logprobs, scored(learner), rtol=0, atol=EXACT)


@pytest.mark.parametrize("count", COUNTS)
def test_a_policy_is_written_as_one_rank_writes_it(models: Path, seen: Any, count: int, tmp_path: Path) -> None:
    """With adapters, in bfloat16."""
    seen(count)
    save(models / "models" / FIRST, ALONE, tmp_path / "one")
    for file in ("model.safetensors", "adapter/adapter_model.safetensors", "config.json"):
        assert (models / f"{count}-saved" / file).read_bytes() == (tmp_path / "one" / file).read_bytes(), file


@pytest.mark.parametrize("count", COUNTS)
def test_a_checkpoint_goes_on_with_any_number_of_ranks(models: Path, seen: Any, count: int) -> None:
    """From one rank to several and back, to the last bit, whether or not all of them see the folder."""
    start, found = torch.load(models / "1.pt"), seen(count)
    for name in ("again", "apart"):
        assert all(torch.equal(found[name][key], weight) for key, weight in start.items())
    trainer = alone(models, count, "matrices")
    for folder, weights in ((f"{count}-checkpoint", found["matrices"]["weights"]), (f"1-{count}-apart", start)):
        trainer.load_checkpoint(models / folder)
        assert all(torch.equal(weights[key], weight) for key, weight in trainer.full_parameters())
    first = alone(models, 2, "matrices")
    first.load_checkpoint(models / "1-checkpoint")
    for ours, theirs in zip(trainer.learner.adamw.state.values(), first.learner.adamw.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "tensor", "context", "told"),
    [
        ("qwen3", 4, 2, 4, 1, r"tensor_parallel: 4 does not divide num_key_value_heads = 2; one of 1, 2"),
        ("qwen3", 5, 5, 5, 1, r"5 does not divide gate_proj's outputs = 48, .*; one of 1$"),
        ("qwen3", 4, 2, 1, 4, r"context_parallel: 4 does not divide num_key_value_heads = 2; one of 1, 2"),
        ("qwen3", 4, 2, 2, 2, r"2 does not divide num_key_value_heads = 1 of each of 2 ranks; one of 1"),
        ("qwen3_moe", 4, 2, 2, 1, r"Qwen3MoeForCausalLM is divided in a way that is not served \(moe_tp_experts"),
    ],
)
def test_a_model_that_does_not_divide_is_refused(
    family: str, heads: int, kv_heads: int, tensor: int, context: int, told: str
) -> None:
    special = EXPERTS if family == "qwen3_moe" else {}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(family, heads, kv_heads, special))
    refuse_undividable(model, 1, 1)
    with pytest.raises(RecipeError, match=told):
        refuse_undividable(model, tensor, context)


def test_ranks_that_no_group_divides_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ranks = 6 is no multiple of .* = 2 \* 2; the nearest is ranks = 4"):
        TrainerConfig(ranks=6, tensor_parallel=2, context_parallel=2)
