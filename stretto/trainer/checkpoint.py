"""A trainer on disk: everything that decides what it does next.

    model.safetensors   parameters by name (float32)
    optimizer.pt        AdamW's moments and steps, torch's random state
    trainer.json        version, bad steps in a row

Written into a sibling folder that is renamed when it is whole.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.core.errors import StoreError
from stretto.trainer.learner import Learner


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Example: ``Position(version=50, bad_steps_in_a_row=0)``"""

    version: int
    bad_steps_in_a_row: int


def save(folder: Path, learner: Learner, version: int) -> None:
    """Write the checkpoint and switch it in; an older one of the same name is replaced."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: parameter.detach().contiguous() for name, parameter in learner.model.named_parameters()}
    save_file(tensors, partial / "model.safetensors")
    state = {"optimizer": learner.optimizer.state_dict(), "random": _random_state(learner)}
    torch.save(state, partial / "optimizer.pt")
    position = Position(version=version, bad_steps_in_a_row=learner.bad_steps_in_a_row)
    (partial / "trainer.json").write_bytes(msgspec.json.encode(position))
    for path in (*partial.iterdir(), partial):
        _flush(path)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    _flush(folder.parent)


def load(folder: Path, learner: Learner) -> int:
    """Put the learner where the checkpoint stands; returns the version.

    Raises:
        StoreError: the folder is not whole, or is of another model; the learner is unchanged.
    """
    device = learner.model.device
    try:
        position = msgspec.json.decode((folder / "trainer.json").read_bytes(), type=Position)
        tensors = load_file(folder / "model.safetensors", device=str(device))
        state = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
        raise StoreError(f"checkpoint {folder} cannot be read: {error}") from error
    parameters = dict(learner.model.named_parameters())
    theirs, ours = ({name: tuple(t.shape) for name, t in some.items()} for some in (tensors, parameters))
    if theirs != ours:
        differing = sorted(dict(theirs.items() ^ ours.items()))
        raise StoreError(f"checkpoint {folder} is of another model; these parameters differ: {', '.join(differing)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    learner.optimizer.load_state_dict(state["optimizer"])
    _set_random_state(learner, state["random"])
    learner.bad_steps_in_a_row = position.bad_steps_in_a_row
    return position.version


def _random_state(learner: Learner) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(learner.model.device)] if learner.model.device.type == "cuda" else states


def _set_random_state(learner: Learner, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0].cpu())
    if len(states) > 1 and learner.model.device.type == "cuda":
        torch.cuda.set_rng_state(states[1].cpu(), learner.model.device)


def _flush(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
