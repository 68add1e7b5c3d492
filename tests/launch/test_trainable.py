"""Promises: adapters for layers that are not there, ranks without a GPU each, and checkpoints of another model or
format are named before anything starts.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stretto.core.errors import RecipeError, RunFolderError
from stretto.launch.preflight.checks import check_checkpoint, check_trainable, too_many_ranks
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.adapters import adapt
from stretto.trainer.config import LoraConfig, TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer
from stretto_app.extensions.preflight.notes import router_notes
from tests.tiny_policy import SMALL

PLAIN, LORA = TrainerConfig(), TrainerConfig(lora=LoraConfig(rank=2))


@pytest.mark.parametrize(
    ("names", "remedies"),
    [
        (("q_prj",), ["did you mean 'q_proj'?"]),
        (("q_proj", "embed_tokens", "qproj"), ["allowed: down_proj, gate_proj, k_proj", "did you mean 'q_proj'?"]),
        (("model.layers.0.self_attn.q_proj",), ["allowed: "]),
        (("lm_head",), ["allowed: "]),
    ],
)
def test_adapters_for_layers_that_are_not_there(policy: Path, names: tuple[str, ...], remedies: list[str]) -> None:
    with pytest.raises(RecipeError) as refused:
        check_trainable(TrainerConfig(lora=LoraConfig(target_modules=names)), policy, gpus=0)
    problems = refused.value.problems
    assert len(problems) == len(remedies)
    for problem, remedy in zip(problems, remedies, strict=True):
        assert problem.place == "trainer.lora.target_modules"
        assert "is no linear layer of the model's decoder" in problem.found
        assert remedy in problem.remedy


def test_adapters_for_layers_that_are_there(policy: Path) -> None:
    check_trainable(TrainerConfig(lora=LoraConfig(target_modules=("q_proj", "down_proj"))), policy, gpus=0)
    check_trainable(LORA, policy, gpus=0)


@pytest.mark.parametrize(("coefficient", "told"), [(0.001, 1), (0, 0), (None, 0)])
def test_a_balancing_loss_that_is_not_trained_is_said(tmp_path: Path, coefficient: float | None, told: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"router_aux_loss_coef": coefficient} if told else {}))
    notes = list(router_notes(tmp_path))
    assert len(notes) == told
    assert all("router_aux_loss_coef = 0.001 is not used" in note for note in notes)


def test_each_rank_needs_a_gpu_of_its_own(policy: Path) -> None:
    check_trainable(TrainerConfig(ranks=2), policy, gpus=2)
    check_trainable(TrainerConfig(ranks=3, device="cpu"), policy, gpus=2)
    check_trainable(TrainerConfig(ranks=3), policy, gpus=0)
    with pytest.raises(RecipeError, match=r"trainer.ranks: 3, and the machine has 2 GPUs"):
        check_trainable(TrainerConfig(ranks=3), policy, gpus=2)
    check_trainable(TrainerConfig(ranks=8, remote_ranks=6), policy, gpus=2)
    with pytest.raises(RecipeError, match=r"trainer.ranks: 8, 3 of them on this machine, and the machine has 2 GPUs"):
        check_trainable(TrainerConfig(ranks=8, remote_ranks=5), policy, gpus=2)


@pytest.mark.parametrize(
    ("ranks", "remote", "tensor", "gpus", "remedy"),
    [
        (4, 0, 2, 3, "at most 2"),
        (8, 2, 2, 3, "trainer.remote_ranks = 6"),
        (8, 4, 4, 3, "trainer.tensor_parallel * trainer.context_parallel of at most 3"),
    ],
)
def test_the_remedy_keeps_ranks_of_a_share_near(ranks: int, remote: int, tensor: int, gpus: int, remedy: str) -> None:
    (problem,) = too_many_ranks(TrainerConfig(ranks=ranks, remote_ranks=remote, tensor_parallel=tensor), gpus)
    assert problem.remedy.startswith(remedy + ", or")


def test_ranks_divide_the_heads_of_the_model(policy: Path) -> None:
    for key in ("tensor_parallel", "context_parallel"):
        with pytest.raises(
            RecipeError, match=rf"trainer.{key}: 2 does not divide num_attention_heads = 1, .*one of 1$"
        ):
            check_trainable(TrainerConfig.model_validate({"ranks": 2, key: 2}), policy, gpus=0)


def checkpoint_of(policy: Path, config: TrainerConfig, folder: Path) -> Path:
    model = load_policy(policy, attention=PACKED_ATTENTION)
    if config.lora is not None:
        adapt(model, config.lora)
    Trainer(model, config, AlgorithmConfig()).save_checkpoint(folder)
    return folder


@pytest.mark.parametrize("config", [PLAIN, LORA])
def test_a_checkpoint_of_this_model_is_gone_on_from(policy: Path, tmp_path: Path, config: TrainerConfig) -> None:
    check_checkpoint(checkpoint_of(policy, config, tmp_path / "v0"), config, policy)


def test_a_checkpoint_of_another_model_is_named_by_what_differs(policy: Path, tmp_path: Path) -> None:
    deeper = tmp_path / "deeper"
    build_policy(SMALL.model_copy(update={"layers": 2}), deeper, seed=1)
    with pytest.raises(RunFolderError, match=r"of another model; these parameters differ: .*model\.layers\.1\."):
        check_checkpoint(checkpoint_of(policy, PLAIN, tmp_path / "v0"), PLAIN, deeper)


def test_a_checkpoint_of_adapters_is_none_of_the_whole_model(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match=r"these parameters differ: .*lora_A.*resume with the model and the adapters"
    ):
        check_checkpoint(checkpoint_of(policy, LORA, tmp_path / "v0"), PLAIN, policy)


def test_a_checkpoint_of_another_format_or_half_of_one_is_named(policy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_file({"model.norm.weight": torch.ones(16)}, other / "model.safetensors")
    with pytest.raises(RunFolderError, match="is of another format: it has no shards"):
        check_checkpoint(other, PLAIN, policy)
    torn = checkpoint_of(policy, PLAIN, tmp_path / "v0")
    (shard,) = torn.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(RunFolderError, match="v0 cannot be read"):
        check_checkpoint(torn, PLAIN, policy)
    shutil.rmtree(torn)
    with pytest.raises(RunFolderError, match=r"v0 (cannot be read|is of another format)"):
        check_checkpoint(torn, PLAIN, policy)
