"""The process of a trainer that is apart: ``python -m stretto.verbs.role SPEC``."""

from __future__ import annotations

import contextlib
import pickle
import sys
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from stretto.core.errors import Problem, RecipeError, StrettoError
from stretto.processes.heartbeat import begin_role
from stretto.trainer.gradients import Gradient
from stretto.verbs.apart.wire import UNDO, TrainerArguments, TrainerCall, receive, send
from stretto.verbs.trainer import LocalTrainer
from stretto.verbs.weights import PolicyWeights


def serve(connection: Connection) -> None:
    """Make a trainer and do what is asked, call by call, until the caller is gone."""
    trainer: LocalTrainer | None = None
    before: Gradient = []
    while True:
        try:
            call: TrainerCall = receive(connection)
        except (EOFError, OSError):
            return
        number, method, packed = call
        value, error = None, None
        try:
            arguments, named = _unpacked(method, packed)
            if trainer is None:
                trainer = LocalTrainer(*arguments, **named)
            elif method == UNDO:
                trainer.gradient = before
            else:
                before = trainer.gradient if method == "forward_backward" else []
                value = _movable(getattr(trainer, method)(*arguments, **named))
        except Exception as raised:  # of a user's loss, or of torch: it is raised where the call was made
            traceback.print_exc()
            error = raised
        with contextlib.suppress(OSError):  # the caller is gone: the next receive says so
            send(connection, (number, 0 if trainer is None else trainer.version, value, _portable(error)))
        if trainer is None:
            return


def _unpacked(method: str, packed: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """
    Raises:
        RecipeError: they name something that this process cannot import.
    """
    try:
        arguments, named = pickle.loads(packed)
    except Exception as error:  # whatever a module of the user's does when it is imported
        told = f"cannot be read in the process of the trainer: {type(error).__name__}: {error}"
        remedy = "define functions and classes in a module that it can import"
        raise RecipeError([Problem(f"{method}: an argument", told, remedy)]) from error
    return arguments, named


def _movable(value: Any) -> Any:
    """A result for another process: weights in the memory of the processor."""
    if isinstance(value, PolicyWeights):
        return replace(value, tensors={name: tensor.cpu() for name, tensor in value.tensors.items()})
    return value


def _portable(error: Exception | None) -> Exception | None:
    """An error for another process; of one that cannot be pickled what it says."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the class of a user's error does when it is pickled
        return StrettoError(f"{type(error).__name__}: {error}")
    return error


def main(arguments: list[str]) -> int:
    """Run the role."""
    descriptor, threads, path = msgspec.json.decode(arguments[0], type=TrainerArguments)
    begin_role()
    torch.set_num_threads(threads)
    sys.path += [folder for folder in path if folder not in sys.path and Path(folder).exists()]
    serve(Connection(descriptor))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
