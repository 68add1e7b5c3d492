"""Trainings by 2 and 4 ranks whose models begin without memory: ``python -m tests.trainer.unloaded_runs FOLDER``.

``FOLDER/models`` holds a folder for each family, and ``large`` of 48M parameters. ``FOLDER/COUNT-RANK.pt`` holds what
that rank saw.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from stretto.model.hf.folder import save_policy
from stretto.model.hf.skeleton import skeleton
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.trainer.config import TrainerConfig
from stretto.trainer.critic import Critic
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import UNCHANGED, Policy
from stretto.trainer.parallel.lora import adapt
from stretto.trainer.parallel.ranks import Ranks
from stretto.trainer.parallel.rendezvous import join, open_store, reach_store
from stretto.trainer.parallel.sharding import shard
from stretto.trainer.reference import ReferencePolicy
from stretto.trainer.trainer import Trainer
from tests.tolerances import EPS, RATE
from tests.trainer.rank_runs import SAMPLING, SCENARIOS, Scenario

SCENARIOS_HERE = ("paper", "critic", "reference", "adapters", "checkpointed")
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


def models(folder: Path) -> Path:
    return folder / "models"


def trainer_of(scenario: Scenario, folder: Path, ranks: Ranks, load: Any, **more: Any) -> Trainer:
    """The scenario's trainer at version 0; `load` makes a model of a folder."""
    settings = {"learning_rate": RATE, "eps": EPS, "minibatches": 2, **scenario.trainer, **more}
    config = TrainerConfig.model_validate(settings)
    algorithm = AlgorithmConfig.model_validate(scenario.algorithm)
    model = load(folder)
    if config.lora is not None:
        adapt(model, config.lora)
    wanted = algorithm.reference is not None and config.lora is None
    reference = ReferencePolicy(load(folder), config, scenario.sampling, ranks) if wanted else None
    critic = Critic(load(folder), config, algorithm.critic, ranks) if algorithm.critic else None
    return Trainer(model, config, algorithm, scenario.sampling, reference=reference, critic=critic, ranks=ranks)


def unloaded(folder: Path) -> PreTrainedModel:
    return skeleton(folder, PACKED_ATTENTION)


def filled(folder: Path, ranks: Ranks) -> Mapping[str, torch.Tensor]:
    """All that a model holds once the ranks have filled it, gathered."""
    policy = Policy(unloaded(folder), TrainerConfig(), UNCHANGED, sharded=True)
    shard(policy, policy.model, ranks)
    held = {**dict(policy.model.named_parameters()), **dict(policy.model.named_buffers())}
    return {name: ranks.full_tensor(one.detach()) for name, one in held.items()}


def played(scenario: Scenario, trainer: Trainer) -> dict[str, Any]:
    updates = [trainer.train(scenario.batch(version)) for version in range(scenario.steps)]
    facts = [{name: v for name, v in u.metrics.items() if not name.startswith("seconds")} for u in updates]
    return {"metrics": facts, "weights": dict(trainer.full_parameters())}


def resident(field: str) -> int:
    """Bytes of a field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def beyond_the_shards(folder: Path, ranks: Ranks) -> int:
    """Bytes at the peak of loading the large model, beyond those that stay."""
    filled(models(folder) / "qwen3-2-2-0", ranks)  # whatever is made on first use
    policy = Policy(unloaded(models(folder) / "large"), TrainerConfig(), UNCHANGED, sharded=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    shard(policy, policy.model, ranks)
    return resident("VmHWM") - resident("VmRSS")


def play_all(folder: Path, rank: int, count: int, port: int) -> None:
    """As one rank of several."""
    ranks = join(reach_store(port, count), rank, count, "cpu")
    families = sorted(path for path in models(folder).iterdir() if path.name != "large")
    seen: dict[str, Any] = {}
    if count == 2:
        seen["beyond"] = beyond_the_shards(folder, ranks)
        seen["filled"] = {family.name: filled(family, ranks) for family in families}
        for name in SCENARIOS_HERE:
            scenario = SCENARIOS[name]
            seen[name] = played(scenario, trainer_of(scenario, folder / "tiny", ranks, unloaded))
    torch.save(seen, folder / f"{count}-{rank}.pt")
    torch.distributed.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for count in (2,):
        store = open_store(count)
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
