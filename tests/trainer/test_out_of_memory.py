"""Promises of a rank that runs out of memory: it is named with the machine and the GPU that it has there, whatever it
was doing and whichever library asked; a checkpoint that does not fit at the moment is not called broken, and one that
is written asks for no GPU. A process keeps to its share of a GPU, where its memory grows in place.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

from stretto.core.errors import OutOfMemory
from stretto.model.device import memory_named, take_share
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import Demonstration, Demonstrations, SaveCheckpoint, SupervisedSpec
from stretto.trainer.ranks import ALONE
from stretto.trainer.roles import supervised
from stretto.trainer.roles.trainer import TrainerRole
from stretto.trainer.trainer import Trainer
from stretto_cluster.ranks.rank import GatheringPublisher
from tests.trainer.rank_runs import SAMPLING, SCENARIOS, trainer_of
from tests.trainer.tiny import spec_of, tiny

WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80 GiB."


def short(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(WORDS)


def role(folder: Path, checkpoint: Path | None = None) -> TrainerRole:
    """Of rank 9, on a machine where it sees GPUs 3 and 5 and has the second."""
    tiny().save_pretrained(folder / "model")
    begin, config = None if checkpoint is None else str(checkpoint), TrainerConfig(ranks=1, minibatches=1)
    spec = spec_of(folder / "model", config, SAMPLING, gpus=("3", "5"), checkpoint=begin)
    return TrainerRole(spec, GatheringPublisher(), ALONE, lambda told: None, 1, " on far")


def test_the_gpu_of_the_rank_s_own_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = role(tmp_path)
    monkeypatch.setattr(Trainer, "snapshot", short)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = r"rank 0 on far ran out of memory on GPU 5 while it copied its state: CUDA out of memory\. Tried to alloc"
    with pytest.raises(OutOfMemory, match=found):
        trainer.carry_out(SaveCheckpoint(folder=str(tmp_path / "v0")))


def test_a_process_that_trains_on_examples_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised, "load_policy", short)
    shown = tmp_path / "shown"
    shown.write_bytes(msgspec.msgpack.encode(Demonstrations(examples=(Demonstration((1,), (2,)),))))
    spec = SupervisedSpec("model", str(shown), "out", "{}", seed=1, threads=1, role="warm start", gpus=("7",))
    with pytest.raises(OutOfMemory, match="the warm start ran out of memory on its device while it trained on"):
        supervised.learn(spec, None)  # type: ignore[arg-type]  # nothing is sent before it has a model


def test_a_checkpoint_that_does_not_fit_at_the_moment_is_not_called_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_of(SCENARIOS["small"], ALONE).save_checkpoint(tmp_path / "v0")
    monkeypatch.setattr(state_dict_loader, "load", short)
    with pytest.raises(OutOfMemory, match="on its device while it loaded its models"):
        role(tmp_path, tmp_path / "v0")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_libraries_that_run_out_of_memory_are_understood(words: str, named: bool) -> None:
    with pytest.raises(OutOfMemory if named else RuntimeError) as raised, memory_named("rank 1", (), 1, "in step 2"):
        raise RuntimeError(words)
    assert isinstance(raised.value, OutOfMemory) is named


def test_a_checkpoint_is_written_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's current device is the first one, and a stream there is half a GiB of it."""
    trainer = trainer_of(SCENARIOS["critic"], ALONE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("current_stream", "Stream", "stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, short)
    trainer.snapshot()(tmp_path / "v0")
    assert list((tmp_path / "v0").glob("shard-*.safetensors"))


@pytest.mark.parametrize("told", [None, "garbage_collection_threshold:0.6"])
def test_a_process_keeps_to_its_share_and_memory_grows_there(told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the environment has settings of its own, which torch has read."""
    settings, shares = list[str](), list[float]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if told is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", told)
    for share in (0.25, 1.0):
        take_share(share)
    assert shares == [0.25]
    assert set(settings) == ({"expandable_segments:True"} if told is None else set())
