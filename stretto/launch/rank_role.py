"""A rank of the trainer but the first: ``python -m stretto.launch.rank_role SPEC``. Does what rank 0 does."""

from __future__ import annotations

import os
import sys
from functools import partial

import msgspec
import torch

from stretto.core.lifeline import take_up_life
from stretto.launch.channel import RoleEnd
from stretto.launch.messages import TO_TRAINER, Failed, NotWritten, Stop, ToTrainer, Written
from stretto.launch.playing import play
from stretto.launch.ranks import EXIT_CODE, RankSpec
from stretto.launch.trainer_role import TrainerRole, TrainerSpec
from stretto.trainer.config import TrainerConfig
from stretto.trainer.rendezvous import join, reach_store
from stretto.weights.mailbox import Onlooker


def follow(spec: RankSpec, orders: RoleEnd[ToTrainer]) -> None:
    """Carry out rank 0's orders until `Stop`; nobody hears the answers."""
    trainer = msgspec.json.decode(spec.trainer, type=TrainerSpec)
    config = TrainerConfig.model_validate_json(trainer.trainer)
    store = reach_store(spec.port, config.ranks)
    ranks = join(store, spec.rank, config.ranks, config.device)
    role = TrainerRole(trainer, Onlooker(), ranks, partial(_tell, orders))
    while (order := orders.receive()) is not None and not isinstance(order, Stop):
        role.carry_out(order)


def _tell(orders: RoleEnd[ToTrainer], message: Written | NotWritten) -> None:
    """Rank 0 waits for what this rank cannot write: it hears of that, and all end."""
    if isinstance(message, NotWritten):
        orders.send(Failed(problem=message.problem, exit_code=message.exit_code))
        os._exit(EXIT_CODE)


def main(arguments: list[str]) -> int:
    """Play the role; see `launch.playing`."""
    spec = msgspec.json.decode(arguments[0], type=RankSpec)
    take_up_life()
    torch.set_num_threads(msgspec.json.decode(spec.trainer, type=TrainerSpec).threads)
    orders: RoleEnd[ToTrainer] = RoleEnd(spec.descriptor, TO_TRAINER)
    return play(lambda: follow(spec, orders), orders.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
