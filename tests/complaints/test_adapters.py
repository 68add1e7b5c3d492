"""What users suffered: adapters travel as the whole model, in another layout, are merged twice, or are lost when they
are evicted (SkyRL#1852, SkyRL#1336, SkyRL#2221, trl#5831, trl#7017).

Promises: a version has the bytes of its adapters, and a few for their names; every token of an engine that loads
adapters while it generates has the log-probability of the merged model of its version, as peft merges it, also where a
completion was evicted from a small cache and computed again."""

from pathlib import Path

import peft
import pytest
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Completion
from stretto.model.hf.build import build_policy
from stretto.model.hf.folder import load_policy
from stretto.trainer.adapters import adapt, gather_adapters
from stretto.trainer.config import LoraConfig, TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.ranks import ALONE
from stretto.trainer.trainer import Trainer
from stretto.weights.folder import path_of
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.engine.answering import assert_each_token_follows_its_version, drain, request
from tests.engine.test_preemption import cache_of
from tests.tiny_policy import TINY
from tests.trainer.batches import batch

LORA = LoraConfig(rank=4, alpha=8)
VERSIONS = 3
A_NAME = 250  # bytes that a tensor's line in the header has, at most
STEPS = 45  # of the engine, between two versions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, versions of its adapters, and of each version the model into which peft has merged them."""
    made: Path = tmp_path_factory.mktemp("adapters")
    build_policy(TINY, made / "policy", seed=1)
    model = load_policy(made / "policy")
    adapt(model, LORA)
    trainer = Trainer(model, TrainerConfig(learning_rate=1e-2, lora=LORA), AlgorithmConfig())
    for version in range(VERSIONS):
        trainer.train(batch(version))
        trainer.publish(SharedMemoryPublisher(f"v{version + 1}", made))  # of a name of its own: the newest two are kept
        (made / f"{version + 1}").mkdir()
        gather_adapters(model, LORA, ALONE)(made / f"{version + 1}")
    return made


def merged(folder: Path, version: int) -> PreTrainedModel:
    plain = load_policy(folder / "policy")
    if not version:
        return plain
    model: PreTrainedModel = peft.PeftModel.from_pretrained(plain, folder / f"{version}" / "adapter").merge_and_unload()
    return model


def test_a_version_has_the_bytes_of_its_adapters(folder: Path) -> None:
    tensors = SharedMemorySubscriber("v1", folder).load(1)
    adapters = sum(tensor.nbytes for tensor in tensors.values())
    whole = sum(parameter.nbytes for parameter in load_policy(folder / "policy").parameters())
    assert adapters <= path_of("v1", folder, 1).stat().st_size <= adapters + A_NAME * len(tensors)
    per_layer = sum(LORA.rank * sum(matrix.shape) for name, matrix in _matrices(folder) if ".layers.0." in name)
    assert adapters == 4 * TINY.layers * per_layer < whole / 2


def _matrices(folder: Path) -> list[tuple[str, Tensor]]:
    return [(name, one) for name, one in load_policy(folder / "policy").named_parameters() if one.dim() == 2]


def test_every_token_has_the_logprob_of_the_merged_model_also_behind_an_eviction(folder: Path) -> None:
    engine = cache_of(folder / "policy", 400, slots=8, max_prefill_tokens=128)
    requests = [
        request(f"r{i}", prompt=4 + 3 * i, seeds=(i, i + 50), stop_token_ids=(), max_tokens=70) for i in range(8)
    ]
    for wanted in requests:
        engine.add(wanted)
    ended: list[Completion] = []
    evicted = []
    for version in range(1, VERSIONS + 1):
        for _ in range(STEPS):
            ended += engine.step()
        evicted.append(engine.health().preempted)
        engine.update(version, SharedMemorySubscriber(f"v{version}", folder).load(version))
        engine.check_integrity()
    ended += drain(engine).values()
    assert len(ended) == 16
    assert evicted[0] < evicted[1] < evicted[2], "while it has the adapters of a version, and of the next one"
    assert {version for completion in ended for version in completion.versions} == set(range(VERSIONS + 1))
    models = {version: merged(folder, version) for version in range(VERSIONS + 1)}
    assert_each_token_follows_its_version(models, requests, ended)
