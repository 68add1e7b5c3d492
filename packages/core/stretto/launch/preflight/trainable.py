"""Checks of the trainer's settings: its ranks, the layers of its adapters, the checkpoint it resumes from."""

from __future__ import annotations

from pathlib import Path

from stretto.core.errors import Problem, RecipeError, RunFolderError, StoreError, nearest
from stretto.model.hf.layers import linear_layers
from stretto.model.hf.skeleton import skeleton
from stretto.trainer import checkpoint
from stretto.trainer.config import TrainerConfig
from stretto.trainer.parallel.lora import adapt
from stretto.trainer.parallel.tensor import refuse_undividable


def check_trainable(config: TrainerConfig, model: Path, gpus: int) -> None:
    """Check ranks and adapters of the trainer.

    Raises:
        RecipeError: more ranks than the machine has `gpus`, ranks that cannot divide the model, or adapters for layers
            that it lacks.
    """
    if config.device != "cpu" and 0 < gpus < config.local_ranks:
        here = f", {config.local_ranks} of them on this machine" if config.remote_ranks else ""
        found = f"{config.ranks}{here}, and the machine has {gpus} GPUs, one for each rank"
        raise RecipeError([Problem("trainer.ranks", found, f'at most {gpus}, or trainer.device = "cpu"')])
    if config.shares < config.ranks:
        refuse_undividable(skeleton(model), config.tensor_parallel, config.context_parallel)
    if config.lora is None or not config.lora.target_modules:
        return
    there = {name.rsplit(".", 1)[-1] for name in linear_layers(skeleton(model))}
    missing = [name for name in config.lora.target_modules if name not in there]
    if missing:
        place = "trainer.lora.target_modules"
        raise RecipeError(
            Problem(place, f"{name!r} is no linear layer of the model's decoder", nearest(name, there))
            for name in missing
        )


def check_checkpoint(folder: Path, config: TrainerConfig, model: Path) -> None:
    """Check that a trainer of this model can resume from the checkpoint in `folder`.

    Raises:
        RunFolderError: it cannot.
    """
    policy = skeleton(model)
    if config.lora is not None:
        adapt(policy, config.lora)
    try:
        checkpoint.check(folder, policy)
    except StoreError as error:
        remedy = "resume with the model and the adapters that it was written with"
        raise RunFolderError([Problem(str(folder), str(error), remedy)]) from error
