"""The process of `Trainer.apart`: ``python -m stretto_verbs.role ARGUMENTS``, with `TrainerArguments` as JSON."""

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
from stretto_verbs.models import PolicyWeights
from stretto_verbs.trainer import LocalTrainer
from stretto_verbs.trainer_apart import UNDO, TrainerArguments, TrainerCall, receive, send


def serve(connection: Connection) -> None:
    """Create a trainer from the first message, then carry out one method call per message. Each is answered by a
    `CallResult`; an error of a call is part of it. The call `UNDO` takes back the last gradient. Returns once the
    caller closes the connection, or if the trainer cannot be created."""
    trainer: LocalTrainer | None = None
    before: Gradient = []
    while True:
        try:
            call: TrainerCall = receive(connection)
        except (EOFError, OSError):
            return
        number, method, packed = call
        value, error = None, None
        if trainer is not None and method != UNDO:
            before = trainer.gradient if method == "forward_backward" else []
        try:
            arguments, named = _unpacked(method, packed)
            if trainer is None:
                trainer = LocalTrainer(*arguments, **named)
            elif method == UNDO:
                trainer.gradient = before
            else:
                value = _movable(getattr(trainer, method)(*arguments, **named))
        except Exception as raised:  # from a user's loss, or from torch: it is raised in the caller's process
            traceback.print_exc()
            error = raised
        with contextlib.suppress(OSError):  # the caller is gone: the next receive says so
            send(connection, (number, 0 if trainer is None else trainer.version, value, _portable(error)))
        if trainer is None:
            return


def _unpacked(method: str, packed: bytes) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Unpickle the arguments of a call of `method` (its name, for the error); returns positional and keyword arguments.
    Raises RecipeError if this process cannot import the function or class of an argument."""
    try:
        arguments, named = pickle.loads(packed)
    except Exception as error:  # importing a user's module may raise anything
        told = f"cannot be read in the process of the trainer: {type(error).__name__}: {error}"
        remedy = "define functions and classes in a module that it can import"
        raise RecipeError([Problem(f"{method}: an argument", told, remedy)]) from error
    return arguments, named


def _movable(value: Any) -> Any:
    """Prepare a result for another process: weights are copied to CPU memory."""
    if isinstance(value, PolicyWeights):
        return replace(value, tensors={name: tensor.cpu() for name, tensor in value.tensors.items()})
    return value


def _portable(error: Exception | None) -> Exception | None:
    """Prepare an error (or None) for another process: one that cannot be pickled becomes a StrettoError."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # pickling a user's error may raise anything
        return StrettoError(f"{type(error).__name__}: {error}")
    return error


def main(arguments: list[str]) -> int:
    """Run the trainer's process: set torch's threads and the import path, serve calls until the caller closes the
    connection; returns the exit code 0. `arguments`: one text, the `TrainerArguments` as JSON."""
    descriptor, threads, path = msgspec.json.decode(arguments[0], type=TrainerArguments)
    begin_role()
    torch.set_num_threads(threads)
    sys.path += [folder for folder in path if folder not in sys.path and Path(folder).exists()]
    serve(Connection(descriptor))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
