"""A trainer on disk: everything that decides what it does next.

    model.safetensors   parameters by name (float32)
    optimizer.pt        AdamW's moments and steps, torch's random state
    trainer.json        version, bad steps in a row
    critic/             the same three of a critic, where there is one

Whoever keeps checkpoints forces them to disk, seals them and switches them in: `store.checkpoints`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from stretto.core.errors import StoreError
from stretto.trainer.stepper import Stepper


class TrainerPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Example: ``TrainerPosition(version=50, bad_steps_in_a_row=0)``"""

    version: int
    bad_steps_in_a_row: int


def save(folder: Path, stepper: Stepper, version: int) -> None:
    """Write the three files into `folder`.

    Raises:
        StoreError: the folder cannot be written (disk full, read-only).
    """
    tensors = {name: parameter.detach().contiguous() for name, parameter in stepper.trained.named_parameters()}
    state = {"optimizer": stepper.optimizer.state_dict(), "random": _random_state(stepper)}
    position = TrainerPosition(version=version, bad_steps_in_a_row=stepper.bad_steps_in_a_row)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        torch.save(state, folder / "optimizer.pt")
        (folder / "trainer.json").write_bytes(msgspec.json.encode(position))
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have words of their own for it
        raise StoreError(f"{folder}: the checkpoint cannot be written: {error}") from error


def load(folder: Path, stepper: Stepper) -> int:
    """Put the parameters and their optimizer where the checkpoint stands; returns the version.

    Raises:
        StoreError: the folder is not whole, or is of another model; nothing has changed.
    """
    device = stepper.device
    try:
        position = msgspec.json.decode((folder / "trainer.json").read_bytes(), type=TrainerPosition)
        tensors = load_file(folder / "model.safetensors", device=str(device))
        state = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
        raise StoreError(f"checkpoint {folder} cannot be read: {error}") from error
    parameters = dict(stepper.trained.named_parameters())
    theirs, ours = ({name: tuple(t.shape) for name, t in some.items()} for some in (tensors, parameters))
    if theirs != ours:
        differing = sorted(dict(theirs.items() ^ ours.items()))
        raise StoreError(f"checkpoint {folder} is of another model; these parameters differ: {', '.join(differing)}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    stepper.optimizer.load_state_dict(state["optimizer"])
    _set_random_state(stepper, state["random"])
    stepper.bad_steps_in_a_row = position.bad_steps_in_a_row
    return position.version


def _random_state(stepper: Stepper) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(stepper.device)] if stepper.device.type == "cuda" else states


def _set_random_state(stepper: Stepper, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0].cpu())
    if len(states) > 1 and stepper.device.type == "cuda":
        torch.cuda.set_rng_state(states[1].cpu(), stepper.device)
