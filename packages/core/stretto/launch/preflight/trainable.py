"""Checks of the trainer's settings: its ranks, the layers of its adapters, and the checkpoint of a resumed run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from stretto.core.errors import Problem, RecipeError, RunFolderError, StoreError, nearest
from stretto.doors.loading import check_packages, from_package
from stretto.model.hf.layers import linear_layers
from stretto.model.hf.skeleton import skeleton
from stretto.trainer import checkpoint
from stretto.trainer.adapters import adapt
from stretto.trainer.config import TrainerConfig


def check_trainable(config: TrainerConfig, model: Path, gpus: int) -> None:
    """Check ranks and adapters of the trainer. `gpus`: number of GPUs of this machine; 0: do not compare.

    Raises:
        RecipeError: there are more ranks than GPUs, the ranks cannot divide the model, or adapters name layers that the
            model does not have.
    """
    if config.ranks > 1:
        check_packages("trainer.ranks", "stretto_cluster")
    if problems := list(too_many_ranks(config, gpus)):
        raise RecipeError(problems)
    check_dividable(config, model)
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


def check_dividable(config: TrainerConfig, model: Path, key: str = "") -> None:
    """Check that the ranks can divide the matrices and heads of a model; does nothing if the recipe divides neither.
    `key`: recipe key that names its folder, for messages; "" for the policy.

    Raises:
        RecipeError: they cannot.
    """
    if config.shares == config.ranks:
        return
    refuse_undividable = from_package("stretto_cluster.ranks.matrices:refuse_undividable", "trainer.ranks")
    try:
        refuse_undividable(skeleton(model), config.tensor_parallel, config.context_parallel)
    except RecipeError as error:
        of = f" of {key}" if key else ""
        raise RecipeError(Problem(one.place, one.found + of, one.remedy) for one in error.problems) from None


def too_many_ranks(config: TrainerConfig, there: int) -> Iterator[Problem]:
    """Yield a problem if there are more local ranks than GPUs. `there`: number of GPUs; 0: none known, no problem."""
    if config.device != "cpu" and 0 < there < config.local_ranks:
        here = f", {config.local_ranks} of them on this machine" if config.remote_ranks else ""
        found = f"{config.ranks}{here}, and the machine has {there} GPUs, one for each rank"
        most = there // config.together * config.together  # ranks that divide a share are of one machine
        fewer = f"trainer.remote_ranks = {config.ranks - most}" if config.remote_ranks else f"at most {most}"
        if not most:
            fewer = f"trainer.tensor_parallel * trainer.context_parallel of at most {there}"
        yield Problem("trainer.ranks", found, f'{fewer}, or trainer.device = "cpu"')


def router_notes(model: Path) -> Iterator[str]:
    """Yield a warning if the model's config asks for a loss that balances its experts. Only the recipe's objective is
    trained, so nothing keeps the experts evenly used."""
    coefficient = json.loads((model / "config.json").read_text(encoding="utf-8")).get("router_aux_loss_coef")
    if isinstance(coefficient, (int, float)) and coefficient:
        yield (
            f"the model's router_aux_loss_coef = {coefficient:g} is not used: the objective of the recipe alone is "
            "trained, and nothing keeps its experts evenly used"
        )


def check_checkpoint(folder: Path, config: TrainerConfig, model: Path) -> None:
    """Check that a trainer of this model can resume from the checkpoint in `folder`.

    Raises:
        RunFolderError: the checkpoint belongs to another model, or to other adapters.
    """
    policy = skeleton(model)
    if config.lora is not None:
        adapt(policy, config.lora)
    try:
        checkpoint.check(folder, policy)
    except StoreError as error:
        remedy = "resume with the model and the adapters that it was written with"
        raise RunFolderError([Problem(str(folder), str(error), remedy)]) from error
