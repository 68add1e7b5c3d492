"""Trainings by 2 and 3 ranks whose models begin without memory: ``python -m tests.trainer.unloaded_runs FOLDER``.

``FOLDER/models`` holds a folder for each family, and ``large`` of 48M parameters. ``FOLDER/COUNT-RANK.pt`` holds what
that rank saw; ``FOLDER/COUNT-saved`` the policy of a trainer's process.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stretto.model.hf.filling import own
from stretto.model.hf.layers import decoder_layers
from stretto.model.hf.skeleton import skeleton
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.messages import SavePolicy
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import UNCHANGED, Policy
from stretto.trainer.parallel.lora import adapt
from stretto.trainer.parallel.ranks import Ranks, ShardedRanks
from stretto.trainer.parallel.rendezvous import join, open_store, reach_store
from stretto.trainer.parallel.sharding import shard
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.roles.trainer import TrainerRole
from stretto.trainer.spec import TrainerSpec
from stretto.trainer.trainer import Trainer
from stretto.weights.mailbox import GatheringPublisher
from tests.tolerances import EPS, RATE
from tests.trainer.rank_runs import SAMPLING, SCENARIOS, Scenario

#: Trained by 2 ranks and by 1; the first by 3 too.
PLAYED = ("critic", "reference", "adapters", "once", "half")
UNLOADED = {name: SCENARIOS[name] for name in PLAYED[:3]} | {
    "once": Scenario(trainer={"reduce_every": "minibatch", "micro_batch_tokens": 24}),
    "half": Scenario(trainer={"dtype": "bfloat16"}, algorithm=SCENARIOS["critic"].algorithm),
}
SAVED = {"lora": {"rank": 2}, "save_dtype": "bfloat16"}
FIRST = "qwen3"


def settings(scenario: Scenario) -> TrainerConfig:
    return TrainerConfig.model_validate({"learning_rate": RATE, "eps": EPS, "minibatches": 2, **scenario.trainer})


def trainer_of(scenario: Scenario, folder: Path, ranks: Ranks, load: Callable[[Path], PreTrainedModel]) -> Trainer:
    """The scenario's trainer at version 0; `load` makes a model of the folder."""
    config, algorithm = settings(scenario), AlgorithmConfig.model_validate(scenario.algorithm)
    model = load(folder)
    if config.lora is not None:
        adapt(model, config.lora)
    wanted = algorithm.reference is not None and config.lora is None
    reference = ReferencePolicy(load(folder), config, scenario.sampling, ranks) if wanted else None
    critic = Critic(load(folder), config, algorithm.critic, ranks) if algorithm.critic else None
    return Trainer(model, config, algorithm, scenario.sampling, reference=reference, critic=critic, ranks=ranks)


def unloaded(folder: Path) -> PreTrainedModel:
    return skeleton(folder, PACKED_ATTENTION)


def held_by(model: nn.Module, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    """Gather all parameters and buffers of a model, by name."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: ranks.full_tensor(one.detach()) for name, one in held.items()}


def filled(folder: Path, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    policy = Policy(unloaded(folder), TrainerConfig(), UNCHANGED, ranks)
    shard(policy, policy.model, ranks)
    return held_by(policy.model, ranks)


def played(scenario: Scenario, trainer: Trainer) -> dict[str, Any]:
    """What training comes to, and the dtype of the stream between the layers."""
    streams: list[torch.dtype] = []
    first = decoder_layers(trainer.learner.model)[0]
    first.register_forward_hook(lambda module, inputs, output: streams.append(output.dtype))
    updates = [trainer.train(scenario.batch(version)) for version in range(scenario.steps)]
    facts = [{name: v for name, v in u.metrics.items() if not name.startswith("seconds")} for u in updates]
    return {"metrics": facts, "weights": dict(trainer.full_parameters()), "streams": set(streams)}


def save(folder: Path, ranks: Ranks, saved: Path) -> None:
    """Load a policy with adapters as the trainer's process does, and save it."""
    spec = TrainerSpec(
        model=str(folder),
        mailbox="",
        mailbox_folder="",
        trainer=TrainerConfig.model_validate({"ranks": ranks.count, "minibatches": 1, **SAVED}).model_dump_json(),
        algorithm="{}",
        sampling=SAMPLING,
        threads=1,
    )
    TrainerRole(spec, GatheringPublisher(), ranks, lambda told: None).carry_out(SavePolicy(folder=str(saved)))


def resident(field: str) -> int:
    """Bytes of a field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def beyond_the_shards(folder: Path, ranks: Ranks) -> tuple[int, int, int]:
    """Bytes of this rank at the peak of loading, beyond its shards; those of one layer, and of the shards."""
    policy = Policy(unloaded(folder), TrainerConfig(), UNCHANGED, ranks)
    layer = sum(parameter.nbytes for parameter in decoder_layers(policy.model)[0].parameters())
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    shard(policy, policy.model, ranks)
    shards = sum(own(parameter).nbytes for parameter in policy.model.parameters())
    return resident("VmHWM") - before - shards, layer, shards


def play_all(folder: Path, rank: int, count: int, port: int) -> None:
    """As one rank of several."""
    ranks = join(reach_store(port, count), rank, count, "cpu")
    models, seen = folder / "models", dict[str, Any]()
    for name in PLAYED if count == 2 else PLAYED[:1]:
        scenario = UNLOADED[name]
        own_ranks = ShardedRanks("cpu", settings(scenario))
        seen[name] = played(scenario, trainer_of(scenario, folder / "tiny", own_ranks, unloaded))
    if count == 2:
        seen["filled"] = {one.name: filled(one, ranks) for one in models.iterdir() if one.name != "large"}
        seen["beyond"] = beyond_the_shards(models / "large", ranks)
        save(models / FIRST, ranks, folder / f"{count}-saved")
    torch.save(seen, folder / f"{count}-{rank}.pt")
    torch.distributed.destroy_process_group()


def main() -> None:
    """Warnings are errors."""
    folder = Path(sys.argv[1])
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    for count in (2, 3):
        store = open_store(count)  # in the parent: all ranks are its children
        forked = multiprocessing.get_context("fork")
        processes = [forked.Process(target=play_all, args=(folder, rank, count, store.port)) for rank in range(count)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                sys.exit(f"{count} ranks: one ended with exit code {process.exitcode}")


if __name__ == "__main__":
    main()
