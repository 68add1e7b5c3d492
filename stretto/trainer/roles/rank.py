"""Ranks 1, 2, ... of the trainer: ``python -m stretto.trainer.roles.rank SPEC``. They do what rank 0 does."""

from __future__ import annotations

import os
import sys
from functools import partial

import msgspec
import torch

from stretto.processes.channel import RoleEnd
from stretto.processes.heartbeat import begin_role
from stretto.processes.run_role import Failed, run_role
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import TO_TRAINER, CheckpointFailed, CheckpointSaved, Stop, ToTrainer
from stretto.trainer.parallel.rendezvous import join, reach_store
from stretto.trainer.roles.rank_group import EXIT_CODE, RankSpec
from stretto.trainer.roles.trainer import TrainerRole
from stretto.trainer.spec import TrainerSpec
from stretto.weights.mailbox import GatheringPublisher


def follow(spec: RankSpec, orders: RoleEnd[ToTrainer]) -> None:
    """Carry out rank 0's orders until `Stop`, without replies."""
    trainer = msgspec.json.decode(spec.trainer, type=TrainerSpec)
    config = TrainerConfig.model_validate_json(trainer.trainer)
    store = reach_store(spec.port, config.ranks)
    ranks = join(store, spec.rank, config.ranks, config.device)
    role = TrainerRole(trainer, GatheringPublisher(), ranks, partial(_tell, orders))
    while (order := orders.receive()) is not None and not isinstance(order, Stop):
        role.carry_out(order)


def _tell(orders: RoleEnd[ToTrainer], message: CheckpointSaved | CheckpointFailed) -> None:
    """Report a checkpoint that failed to rank 0, which waits for it in a collective, and end."""
    if isinstance(message, CheckpointFailed):
        orders.send(Failed(problem=message.problem, exit_code=message.exit_code))
        os._exit(EXIT_CODE)


def main(arguments: list[str]) -> int:
    """Run the role; see `processes.run_role`."""
    spec = msgspec.json.decode(arguments[0], type=RankSpec)
    begin_role()
    torch.set_num_threads(msgspec.json.decode(spec.trainer, type=TrainerSpec).threads)
    orders: RoleEnd[ToTrainer] = RoleEnd(spec.descriptor, TO_TRAINER)
    return run_role(lambda: follow(spec, orders), orders.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
