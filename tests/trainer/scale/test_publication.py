"""Promises of several ranks: each sends its shard in the dtype that is published, and the version is that of whole
parameters rounded afterwards, to the last bit; a reference policy is held in the dtype in which it is gathered."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.adapters import adapt
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import UNCHANGED
from stretto.trainer.ranks import ALONE
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from stretto_cluster.ranks.rank import GatheringPublisher
from tests.trainer.scale.collectives import Collectives
from tests.trainer.scale.counting import ranks_without_machines
from tests.trainer.scale.real_ranks import SMALL


def settings(count: int, *, lora: bool) -> TrainerConfig:
    more = {"lora": {"rank": 4, "alpha": 6}} if lora else {}
    return TrainerConfig.model_validate({"device": "cpu", "ranks": count, **more})


@pytest.mark.parametrize("lora", [False, True])
def test_ranks_gather_what_is_published_in_its_dtype(tmp_path: Path, lora: bool) -> None:
    """One of two ranks sends its half of the parameters, once each."""
    config = settings(2, lora=lora)
    with ranks_without_machines(2, config, gpu=False) as ranks:
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(SMALL, attn_implementation=PACKED_ATTENTION)
        if config.lora is not None:
            adapt(model, config.lora)
        published = [one for name, one in model.named_parameters() if not lora or ".lora_" in name]
        whole = sum(one.numel() for one in published)
        trainer = Trainer(model, config, AlgorithmConfig(), ranks=ranks)
        for dtype, width in ((torch.bfloat16, 2), (None, 4)):
            publishers = GatheringPublisher(dtype), SharedMemoryPublisher("run", tmp_path, dtype)
            for publisher in publishers:
                with Collectives(ranks) as seen:
                    trainer.copied(publisher)
                assert seen.bytes("data") == width * whole // 2


@pytest.mark.parametrize("lora", [False, True])
def test_a_shard_that_is_rounded_is_the_whole_rounded(tmp_path: Path, lora: bool) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(SMALL, attn_implementation=PACKED_ATTENTION)
    config = settings(1, lora=lora)
    if config.lora is not None:
        adapt(model, config.lora)
        for name, one in model.named_parameters():
            if ".lora_B" in name:
                torch.nn.init.normal_(one)
    trainer = Trainer(model, config, AlgorithmConfig())
    for name, dtype in (("half", torch.bfloat16), ("whole", None)):
        trainer.publish(SharedMemoryPublisher(name, tmp_path, dtype))
    half, exact = (SharedMemorySubscriber(name, tmp_path).load(0) for name in ("half", "whole"))
    assert half.keys() == exact.keys()
    for name, one in half.items():
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, exact[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_reference_policy_is_held_as_it_is_gathered(dtype: str) -> None:
    """Its buffers stay in float32, and so does all of it where one rank holds it."""
    config = TrainerConfig.model_validate({"device": "cpu", "ranks": 2, "dtype": dtype})
    for count in (2, 1):
        with ranks_without_machines(2, config, gpu=False) as several:
            model = AutoModelForCausalLM.from_config(SMALL, attn_implementation=PACKED_ATTENTION)
            frozen = ReferencePolicy(model, config, UNCHANGED, several if count > 1 else ALONE)
            held = {parameter.dtype for parameter in frozen._policy.parameters()}
            assert held == {getattr(torch, dtype if count > 1 else "float32")}
            assert {buffer.dtype for buffer in frozen._policy.buffers()} == {torch.float32}
