"""Trainings in which ranks divide matrices or tokens: ``python -m tests.trainer.parallel.runs FOLDER COUNT``.

``FOLDER/models`` holds a folder for each family. ``FOLDER/COUNT-RANK.pt`` holds what that rank saw;
``FOLDER/COUNT-saved`` the policy of a trainer's process, ``FOLDER/COUNT-checkpoint`` what the first run left.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.model.packed.logprobs import pack_tokens
from stretto.trainer.config import TrainerConfig
from stretto.trainer.optimizer import UNCHANGED, Learner
from stretto.trainer.ranks import Ranks
from stretto.trainer.trainer import Trainer
from stretto_cluster.ranks.collectives import ShardedRanks, join, reach_store
from tests.tolerances import RATE
from tests.trainer.rank_runs import Scenario, settings, trainer_of
from tests.trainer.several_ranks import fork_ranks, prepare
from tests.trainer.unloaded import held_by, save, unloaded

FIRST = "qwen3"
TENSOR, CONTEXT = {"tensor_parallel": 2}, {"context_parallel": 2}
WHOLE = {
    "advantages": {"kind": "gae", "critic": {"learning_rate": RATE}},
    "reference": {"weight": 0.1},
    "entropy": True,
    "entropy_bonus": 0.01,
}
CHOSEN = {"loss": {"kind": "m2po", "threshold": 0.5}, "advantages": "batch", "aggregation": "sequence_mean"}
LORA = {"lora": {"rank": 2}}

#: Of each number of ranks; the first leaves a checkpoint, and the last goes on from one.
PLAYED: dict[int, dict[str, Scenario]] = {
    2: {
        "matrices": Scenario(algorithm=WHOLE, trainer=TENSOR | {"activation_checkpointing": True}),
        "matrices, adapters": Scenario(steps=1, algorithm={"reference": {"weight": 0.1}}, trainer=TENSOR | LORA),
        "tokens": Scenario(steps=1, algorithm=WHOLE, trainer=CONTEXT | {"activation_checkpointing": True}),
        "tokens, adapters": Scenario(steps=1, algorithm=CHOSEN, trainer=CONTEXT | LORA | {"micro_batch_tokens": 24}),
    },
    4: {
        "matrices": Scenario(algorithm=WHOLE, trainer=TENSOR),
        "tokens": Scenario(algorithm=CHOSEN, trainer=CONTEXT),
        "matrices, tokens": Scenario(algorithm=WHOLE, trainer=TENSOR | CONTEXT),
    },
}


def settled(scenario: Scenario, count: int) -> Scenario:
    """The scenario as `count` ranks train it; one divides nothing."""
    divided = {key: value for key, value in scenario.trainer.items() if count > 1 or not key.endswith("_parallel")}
    return replace(scenario, trainer={**divided, "ranks": count})


def filled(folder: Path, ranks: Ranks) -> tuple[Mapping[str, Tensor], Tensor]:
    """What a model holds, and its log-probabilities."""
    learner = Learner(unloaded(folder), TrainerConfig(), UNCHANGED, ranks)
    return held_by(learner.model, ranks), scored(learner)


def scored(learner: Learner) -> Tensor:
    with torch.no_grad():
        return learner.logprobs(pack_tokens([[1, 5, 3, 7, 2, 9, 11], [4, 4, 8]])).logprobs


def played(scenario: Scenario, trainer: Trainer) -> dict[str, Any]:
    """What training comes to."""
    updates = [trainer.train(scenario.batch(version)) for version in range(scenario.steps)]
    facts = [{name: v for name, v in u.metrics.items() if not name.startswith("seconds")} for u in updates]
    return {"metrics": facts, "weights": dict(trainer.full_parameters())}


def went_on(trainer: Trainer, start: Path, folder: Path) -> Mapping[str, Tensor]:
    """The weights of a checkpoint, which is then written to another folder."""
    trainer.load_checkpoint(start)
    trainer.save_checkpoint(folder)
    return {name: weight.clone() for name, weight in trainer.full_parameters()}


def play_all(folder: Path, rank: int, count: int, port: int) -> None:
    """As one rank of several."""
    join(reach_store(port, count), rank, count, "cpu")
    models, seen = folder / "models", dict[str, Any]()
    for name, scenario in PLAYED[count].items():
        settled_scenario = settled(scenario, count)
        ranks = ShardedRanks("cpu", settings(settled_scenario))
        load = partial(unloaded, models / FIRST)
        trainer = trainer_of(settled_scenario, ranks, load)
        seen[name] = played(settled_scenario, trainer)
        if name == "matrices":
            trainer.save_checkpoint(folder / f"{count}-checkpoint")
            seen["filled"] = {one.name: filled(one, ranks) for one in models.iterdir()}
            save(models / FIRST, ranks, folder / f"{count}-saved")
            again = trainer_of(settled_scenario, ranks, load)
            seen["again"] = went_on(again, folder / "1-checkpoint", folder / f"1-{count}-checkpoint")
            apart = folder if rank == 0 else folder / "not-there"
            seen["apart"] = went_on(again, apart / f"1-{count}-checkpoint", apart / f"1-{count}-apart")
    torch.save(seen, folder / f"{count}-{rank}.pt")
    torch.distributed.destroy_process_group()


def main() -> None:
    fork_ranks(int(sys.argv[2]), play_all, prepare())


if __name__ == "__main__":
    main()
