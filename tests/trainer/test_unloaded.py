"""Promises of models that are built without memory, sharded, and filled from their folder by 2 and 3 ranks:

- they hold what a loaded model holds, to the last bit, buffers and merged experts included;
- loading takes no more than a layer beyond the shards;
- training gives the losses of one rank, with critic, reference, adapters, and gradients summed once a minibatch;
- in bfloat16 the stream between the layers is bfloat16, and one rank keeps its own float32 stream;
- a policy that ranks have written has the bytes of one that a single rank has written.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from stretto.core.errors import ModelFolderError
from stretto.model.hf import writing
from stretto.model.hf.filling import fill
from stretto.model.hf.folder import load_policy, save_policy
from stretto.model.hf.layers import saved_buffers
from stretto.model.hf.skeleton import skeleton
from stretto.model.hf.writing import write_weights
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.parallel.ranks import ALONE
from tests.launch.warm import MARK, WarmCommand
from tests.model.families import EXPERTS, SLIDING, config
from tests.tolerances import after_adam
from tests.trainer.tiny import BACKWARD, tiny
from tests.trainer.unloaded_runs import FIRST, PLAYED, UNLOADED, held_by, played, save, trainer_of

FAMILIES: dict[str, dict[str, Any]] = {
    FIRST: {},
    "qwen2": {},
    "gemma3_text": {"sliding_window": 7, "layer_types": SLIDING, "query_pre_attn_scalar": 8},
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},  # a saved buffer balances its experts
}
LARGE = Qwen3Config(
    vocab_size=4096,
    hidden_size=640,
    num_hidden_layers=8,
    num_attention_heads=10,
    num_key_value_heads=10,
    head_dim=64,
    intermediate_size=1920,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and what every rank of every training saw."""
    folder = tmp_path_factory.mktemp("unloaded")
    for number, (family, special) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_config(config(family, 4, 2, special))
        for _, buffer in saved_buffers(model):
            torch.nn.init.normal_(buffer)
        model.save_pretrained(folder / "models" / family)
    AutoModelForCausalLM.from_config(LARGE, dtype=torch.bfloat16).save_pretrained(folder / "models" / "large")
    tiny().save_pretrained(folder / "tiny")
    command = WarmCommand([str(folder)], folder, {**os.environ, MARK: uuid4().hex}, "tests.trainer.unloaded_runs")
    try:
        said = "".join(command.communicate(200))
    finally:
        command.kill()
    assert command.returncode == 0, said
    return folder


def seen(folder: Path, count: int, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"{count}-{rank}.pt", weights_only=False)
    return found


def loaded(folder: Path) -> Any:
    return load_policy(folder, attention=PACKED_ATTENTION)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_fill_a_model_with_what_its_folder_holds(folder: Path, family: str) -> None:
    whole, own = held_by(loaded(folder / "models" / family), ALONE), seen(folder, 2)["filled"][family]
    assert whole.keys() == own.keys()
    assert all(torch.equal(own[name], one) for name, one in whole.items())


def test_loading_takes_no_more_than_a_layer_beyond_the_shards(folder: Path) -> None:
    """Of 48M parameters the shards of 2 ranks are 96 MB each, and a layer is 21 MB."""
    for rank in range(2):
        beyond, layer, shards = seen(folder, 2, rank)["beyond"]
        assert shards > 4 * layer
        assert beyond < layer


@pytest.mark.parametrize("name", [name for name in PLAYED if name != "half"])
def test_the_losses_are_those_of_one_rank(folder: Path, name: str) -> None:
    scenario = UNLOADED[name]
    one = played(scenario, trainer_of(scenario, folder / "tiny", ALONE, loaded))
    tolerance = after_adam(scenario.steps * 2, BACKWARD)
    for count in (2, 3) if name == PLAYED[0] else (2,):
        several = seen(folder, count)[name]
        for ours, theirs in zip(several["metrics"], one["metrics"], strict=True):
            assert ours == {key: pytest.approx(value, rel=1e-5, abs=1e-5) for key, value in theirs.items()}
        for key, weight in one["weights"].items():
            torch.testing.assert_close(several["weights"][key], weight, rtol=0, atol=tolerance, msg=key)


def test_in_bfloat16_ranks_keep_the_stream_in_it_and_one_rank_in_float32(folder: Path) -> None:
    """Compare losses up to the rounding of bfloat16, 2^-8; master weights stay in float32."""
    scenario = UNLOADED["half"]
    one = played(scenario, trainer_of(scenario, folder / "tiny", ALONE, loaded))
    several = seen(folder, 2)["half"]
    assert (one["streams"], several["streams"]) == ({torch.float32}, {torch.bfloat16})
    assert {weight.dtype for weight in several["weights"].values()} == {torch.float32}
    for ours, theirs in zip(several["metrics"], one["metrics"], strict=True):
        for key in ("loss", "value_loss", "entropy"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], abs=2**-5)
    exact = seen(folder, 2)["critic"]["metrics"]
    assert several["metrics"] != exact


def test_a_policy_is_written_alike_by_ranks_and_by_one(folder: Path, tmp_path: Path) -> None:
    """With adapters, in bfloat16."""
    save(folder / "models" / FIRST, ALONE, tmp_path / "one")
    saved = tmp_path / "one"
    files = sorted(
        file.relative_to(saved) for file in saved.rglob("*") if file.name != "adapter_config.json" and file.is_file()
    )
    assert Path("model.safetensors") in files
    assert Path("adapter/adapter_model.safetensors") in files
    for file in files:
        assert (folder / "2-saved" / file).read_bytes() == (saved / file).read_bytes(), file


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_written_layer_by_layer_are_those_that_transformers_writes(
    folder: Path, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = folder / "models" / family
    model = load_policy(start)
    write_weights(model, chain(model.named_parameters(), saved_buffers(model)), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (start / "model.safetensors").read_bytes()
    monkeypatch.setattr(writing, "_FILE_BYTES", 20_000)
    save_policy(model, start, tmp_path / "parts", model.named_parameters())
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 1
    again = load_policy(tmp_path / "parts")
    assert all(torch.equal(held_by(again, ALONE)[name], one) for name, one in held_by(model, ALONE).items())


def test_a_folder_that_lacks_weights_or_holds_no_numbers_is_refused(tmp_path: Path) -> None:
    for name, value, told in (("spoilt", float("nan"), "holds numbers that are not finite"), ("torn", None, "lacks")):
        model = tiny()
        kept = dict(model.state_dict())
        gone = "model.layers.1.mlp.up_proj.weight"
        kept[gone] = torch.full_like(kept[gone], value) if value is not None else kept.pop(gone)[:0]
        model.save_pretrained(tmp_path / name, state_dict={key: one for key, one in kept.items() if one.numel()})
        bare = skeleton(tmp_path / name, PACKED_ATTENTION)
        with pytest.raises(ModelFolderError, match=f"{told}.*{gone}|{gone}.*{told}"):
            fill(bare, bare, "cpu")
