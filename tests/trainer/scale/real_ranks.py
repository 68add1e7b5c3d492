"""Steps of real ranks on gloo, with their memory: ``python -m tests.trainer.scale.real_ranks FOLDER COUNT``.

``FOLDER/model`` is the policy, ``FOLDER/small`` one that comes before. ``FOLDER/COUNT-RANK.pt`` holds the losses of two
steps and the bytes at the peak of the second, beyond those of the process before it has the model.
"""

import gc
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config

from stretto.model.hf.folder import load_policy
from stretto.model.hf.skeleton import skeleton
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.processes.kernel import set_memory
from stretto.trainer.batch.minibatch import Minibatch, minibatch
from stretto.trainer.batch.samples import Sample
from stretto.trainer.config import TrainerConfig
from stretto.trainer.gradients import Gradients
from stretto.trainer.metrics import Meter
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import UNCHANGED, Learner
from stretto.trainer.ranks import ALONE, Ranks
from stretto_cluster.ranks.collectives import join, reach_store
from tests.tiny_policy import sized
from tests.trainer.several_ranks import fork_ranks
from tests.trainer.unloaded import resident


def shape_of(vocabulary: int, width: int, layers: int, inner: int) -> Qwen3Config:
    shape = sized(vocabulary, width, inner, layers, heads=(6, 3), head=64, max_position_embeddings=256)
    return Qwen3Config(**shape, tie_word_embeddings=False)


SHAPE = shape_of(16_384, 384, 6, 1024)  # 22M parameters
SMALL = shape_of(512, 64, 2, 128)
SEQUENCES, TOKENS = 8, 128
SETTINGS = {"micro_batch_tokens": TOKENS, "minibatches": 1, "device": "cpu"}
_RETURNED = {-1: 0, -2: 0, -3: 1 << 16}  # mallopt's trim threshold, padding, mmap threshold: what is free is returned


def config_of(count: int) -> TrainerConfig:
    return TrainerConfig.model_validate({**SETTINGS, "ranks": count})


def part_of(config: TrainerConfig, ranks: Ranks) -> Minibatch:
    """A minibatch of random tokens."""
    drawn = random.Random(7)
    samples = [
        Sample(
            id=f"{number}",
            token_ids=[drawn.randrange(SMALL.vocab_size) for _ in range(TOKENS)],
            loss_positions=range(1, TOKENS),
            behavior_logprobs=[-9.7] * (TOKENS - 1),
            advantages=[drawn.uniform(-1, 1) for _ in range(TOKENS - 1)],
            staleness=[0] * (TOKENS - 1),
            prompt_tokens=1,
        )
        for number in range(SEQUENCES)
    ]
    return minibatch(samples, config, "token_mean", TOKENS, torch.device("cpu"), ranks)


def play(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Two steps, after two of a small model: code that has run is in memory, of a process with any model."""
    steps(folder / "small", ranks)
    gc.collect()
    return steps(folder / "model", ranks)


def steps(model: Path, ranks: Ranks) -> dict[str, Any]:
    """The losses of two steps, and the bytes at the peak of the second."""
    config = config_of(ranks.count)
    before = resident("VmRSS")
    policy = skeleton(model, PACKED_ATTENTION) if ranks.count > 1 else load_policy(model, attention=PACKED_ATTENTION)
    learner = Learner(policy, config, UNCHANGED, ranks)
    gradients, losses, peak = Gradients(learner, AlgorithmConfig()), list[float](), 0
    for step in range(2):
        meter, part = Meter(), part_of(config, ranks)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
        gradients.accumulate(part, meter, first=True)
        meter.stepped(learner.step(1e-4, step))
        peak = resident("VmHWM") - before
        losses.append(meter.metrics(ranks)["loss"])
    return {"losses": losses, "peak": peak}


def play_one(folder: Path, rank: int, count: int, port: int) -> None:
    """As one rank of several."""
    ranks = join(reach_store(port, count), rank, count, "cpu")
    torch.save(play(folder, ranks), folder / f"{count}-{rank}.pt")
    torch.distributed.destroy_process_group()


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    set_memory(_RETURNED)
    torch.set_num_threads(1)
    if count == 1:
        torch.save(play(folder, ALONE), folder / "1-0.pt")
        return
    fork_ranks(count, play_one, folder)


if __name__ == "__main__":
    main()
