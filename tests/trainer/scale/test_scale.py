"""Promises of the estimates of a rank's memory and traffic (`trainer.memory`), held against a count of the trainer's
own step (`counting`) at the shapes of Qwen3 and of the paper's recipes, 32k tokens, in bfloat16, on 1 to 96 ranks:

- memory agrees within a tenth, with and without checkpointing, adapters, reference, critic, moments in host memory,
  gradients summed once a minibatch or in bfloat16, and ranks that divide tokens or matrices;
- the bytes of gathers, sums and exchanges agree within a hundredth, so that nothing is sent twice;
- memory is linear in the number of layers, so a few are counted in place of all; two models are counted whole;
- autocast's copies of all weights are gone: a rank holds two layers gathered, not all;
- the estimate says its largest part and a key that shrinks it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from stretto.launch.recipe.recipe import load_recipe
from stretto.model.hf.shape import ModelShape, shape_of_model
from stretto.model.hf.skeleton import outlined
from stretto.trainer.config import TrainerConfig
from stretto.trainer.memory import RankMemory, rank_memory, step_traffic
from tests.tiny_policy import sized
from tests.trainer.scale.counting import Counted, step_bytes

TOKENS = 32_768
PAPER = Path(__file__).parents[3] / "recipes" / "paper"
#: (width, MLP, heads, key heads, tied) of Qwen3.
SHAPES = {
    "0.6b": (1024, 3072, 16, 8, True),
    "1.5b": (1536, 8960, 12, 2, False),  # of R1-Distill-Qwen, the paper's, with Qwen3's layers
    "8b": (4096, 12_288, 32, 8, False),
    "32b": (5120, 25_600, 64, 8, False),
}
LAYERS = {"0.6b": 28, "1.5b": 28, "8b": 36, "32b": 64}
#: The axis of the ranks that each kind of traffic joins.
AXES = {"gather": "data", "reduce": "data", "sum": "tensor", "exchange": "context"}
SAVING: dict[str, Any] = {"activation_checkpointing": True}


def config_of(name: str, layers: int) -> Qwen3Config:
    width, inner, heads, kv_heads, tied = SHAPES[name]
    shape = sized(151_936, width, inner, layers, (heads, kv_heads), head=128, max_position_embeddings=40_960)
    return Qwen3Config(**shape, tie_word_embeddings=tied)


def shape_of(config: Qwen3Config) -> ModelShape:
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    name = next(name for name, (width, *_) in SHAPES.items() if width == config.hidden_size)
    width, _, heads, kv_heads, tied = SHAPES[name]
    return ModelShape(parameters, config.num_hidden_layers, width, heads, kv_heads, 128, 151_936, tied, plain=True)


def settings(ranks: int, more: dict[str, Any]) -> dict[str, Any]:
    return {"ranks": ranks, "dtype": "bfloat16", "micro_batch_tokens": TOKENS, **more}


def counted(name: str, layers: int, ranks: int, more: dict[str, Any], **parts: Any) -> Counted:
    return step_bytes(config_of(name, layers), settings(ranks, more), TOKENS, **parts)


def estimated(
    name: str, layers: int, ranks: int, more: dict[str, Any], reference: bool = False, critic: bool = False
) -> RankMemory:
    config, shape = TrainerConfig.model_validate(settings(ranks, more)), shape_of(config_of(name, layers))
    return rank_memory(shape, config, ranks, TOKENS, reference=shape if reference else None, critic=critic)


def holds(name: str, layers: int, ranks: int, more: dict[str, Any], parts: dict[str, Any]) -> None:
    """The estimates are the count."""
    found = counted(name, layers, ranks, more, **parts)
    models = dict(parts)
    several = models.pop("micro_batches", 1)
    memory = estimated(name, layers, ranks, more, **models)
    assert memory.total == pytest.approx(found.peak, rel=0.1)
    assert memory.host == pytest.approx(found.host, rel=0.01)  # rows that 96 does not divide
    if parts.get("critic") or ranks == 1:  # a critic's own traffic is in no estimate
        return
    traffic_holds(found, shape_of(config_of(name, layers)), settings(ranks, more), several)


def traffic_holds(found: Counted, shape: ModelShape, settings: dict[str, Any], micro_batches: int = 1) -> None:
    for kind, size in step_traffic(shape, TrainerConfig.model_validate(settings), TOKENS, micro_batches).items():
        assert found.collectives.bytes(AXES[kind], kind) == pytest.approx(size, rel=0.01, abs=TOKENS * 4), kind


def test_the_estimates_are_the_count_of_a_step() -> None:
    """A layer of 32B on 96 ranks with moments in host memory: the count has no more than two layers of gathered
    weights."""
    holds("32b", 1, 96, SAVING | {"optimizer_states": "host"}, {})


LONGER = [
    ("0.6b", 8, SAVING, {}),
    ("0.6b", 8, {}, {}),
    ("0.6b", 8, {"reduce_every": "minibatch"}, {"micro_batches": 2}),
    ("8b", 8, SAVING, {}),
    ("8b", 8, {}, {}),
    ("8b", 8, SAVING | {"lora": {"rank": 16}}, {}),
    ("8b", 8, {"lora": {"rank": 16}}, {}),
    ("8b", 64, SAVING, {"reference": True, "critic": True}),
    ("32b", 96, SAVING | {"reduce_dtype": "bfloat16"}, {}),
    ("32b", 96, {}, {}),
    ("0.6b", 1, {}, {}),
    ("0.6b", 1, SAVING, {}),
    ("8b", 1, {}, {}),
    ("8b", 1, {"lora": {"rank": 16}}, {}),
    ("8b", 8, {"context_parallel": 4}, {}),
    ("8b", 8, {"tensor_parallel": 4}, {}),
    ("8b", 8, {"tensor_parallel": 2, "lora": {"rank": 16}}, {}),
    ("8b", 8, SAVING | {"optimizer_states": "host"}, {"critic": True}),
    ("8b", 8, SAVING | {"tensor_parallel": 2, "context_parallel": 2}, {}),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "ranks", "more", "parts"), LONGER)
def test_the_estimates_are_the_count_in_other_settings(
    name: str, ranks: int, more: dict[str, Any], parts: dict[str, Any]
) -> None:
    holds(name, 2, ranks, more, parts)


@pytest.mark.long
@pytest.mark.parametrize("name", ["math_1.5b", "math_7b", "math_14b", "math_32b"])
def test_the_estimates_are_the_count_of_the_paper_s_recipes(name: str, tmp_path: Path) -> None:
    """Its model, with two of the layers, ranks and keys of the trainer as they are."""
    recipe = load_recipe(PAPER / f"{name}.toml", ["rewards.workers=1"])
    assert recipe.model.path is not None
    told = json.loads((Path(recipe.model.path) / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(told))
    asked, shape = recipe.trainer.model_dump(exclude={"device", "minibatches"}), shape_of_model(outlined(tmp_path)[0])
    found = step_bytes(AutoConfig.from_pretrained(tmp_path), asked, TOKENS)
    estimate = rank_memory(shape, recipe.trainer, recipe.trainer.ranks, TOKENS)
    assert estimate.total == pytest.approx(found.peak, rel=0.1)
    traffic_holds(found, shape, asked)


@pytest.mark.long
@pytest.mark.parametrize(("name", "more"), [("0.6b", {}), ("1.5b", SAVING)])
def test_the_estimates_are_the_count_of_all_layers(name: str, more: dict[str, Any]) -> None:
    holds(name, LAYERS[name], 8, more, {})


@pytest.mark.long
def test_the_count_is_linear_in_the_layers() -> None:
    """And the estimate with it, so that it is right for all layers if it is for a few."""
    two, three, five = (counted("8b", layers, 8, SAVING).peak for layers in (2, 3, 5))
    assert five - three == pytest.approx(2 * (three - two), rel=0.02)
    guess = [estimated("8b", layers, 8, SAVING).total for layers in (2, 3, 5)]
    assert guess[2] - guess[1] == pytest.approx(five - three, rel=0.1)


def test_the_estimate_says_what_is_largest_and_what_shrinks_it() -> None:
    whole = estimated("8b", LAYERS["8b"], 8, {})
    assert whole.largest == "activations"
    assert "trainer.activation_checkpointing = true" in str(whole)
    saving = estimated("8b", LAYERS["8b"], 8, SAVING)
    assert saving.smaller["activations"] == "a smaller sampling.max_tokens, or trainer.context_parallel", "as done"
    wider = estimated("8b", 2, 8, SAVING | {"micro_batch_tokens": 2 * TOKENS})
    assert wider.smaller["activations"] == "a smaller trainer.micro_batch_tokens, or trainer.context_parallel"
    assert saving.total < whole.total / 2
    assert saving.parts[saving.largest] == max(saving.parts.values())
    few = estimated("32b", LAYERS["32b"], 8, SAVING)
    assert few.largest == "moments"
    assert "trainer.ranks" in str(few)
    assert "reference" not in whole.parts


def test_the_paper_s_models_fit_a_device_of_80_gib() -> None:
    """With checkpointing: 32B on 96 ranks, 8B on 8."""
    for name, ranks in (("32b", 96), ("8b", 8)):
        assert estimated(name, LAYERS[name], ranks, SAVING).total < 72 << 30
