"""A rank of the trainer but the first: ``python -m stretto.launch.rank_role SPEC``. Does what rank 0 does."""

from __future__ import annotations

import sys

import msgspec
import torch

from stretto.core.lifeline import die_with_parent, keep_beating
from stretto.launch.channel import RoleEnd
from stretto.launch.messages import TO_TRAINER, Stop, ToTrainer
from stretto.launch.playing import play
from stretto.launch.ranks import RankSpec
from stretto.launch.trainer_role import TrainerRole, TrainerSpec
from stretto.trainer.config import TrainerConfig
from stretto.trainer.rendezvous import join, reach_store
from stretto.weights.mailbox import Onlooker


def follow(spec: RankSpec, orders: RoleEnd[ToTrainer]) -> None:
    """Carry out rank 0's orders until `Stop`; nobody hears the answers."""
    trainer = msgspec.json.decode(spec.trainer, type=TrainerSpec)
    config = TrainerConfig.model_validate_json(trainer.trainer)
    store = reach_store(spec.port, config.ranks)
    role = TrainerRole(trainer, Onlooker(), join(store, spec.rank, config.ranks, config.device))
    while (order := orders.receive()) is not None and not isinstance(order, Stop):
        role.carry_out(order)


def main(arguments: list[str]) -> int:
    """Play the role; see `launch.playing`."""
    spec = msgspec.json.decode(arguments[0], type=RankSpec)
    die_with_parent(spec.parent)
    keep_beating()
    torch.set_num_threads(msgspec.json.decode(spec.trainer, type=TrainerSpec).threads)
    orders: RoleEnd[ToTrainer] = RoleEnd(spec.descriptor, TO_TRAINER)
    return play(lambda: follow(spec, orders), orders.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
