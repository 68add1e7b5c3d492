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

from stretto.core.errors import StrettoError
from stretto.processes.heartbeat import begin_role
from stretto.verbs.apart.wire import Answer, Call, TrainerApartSpec, receive, send
from stretto.verbs.trainer import LocalTrainer
from stretto.verbs.weights import PolicyWeights


def serve(connection: Connection) -> None:
    """Make a trainer and do what is asked, call by call, until the caller is gone."""
    trainer: LocalTrainer | None = None
    while True:
        try:
            call: Call = receive(connection)
        except (EOFError, OSError):
            return
        try:
            if trainer is None:
                trainer = LocalTrainer(*call.arguments, **call.named or {})
                value: Any = None
            else:
                value = getattr(trainer, call.method)(*call.arguments, **call.named or {})
            answer = Answer(call.number, trainer.version, _movable(value))
        except Exception as error:  # of a user's loss, or of torch: it is raised where the call was made
            traceback.print_exc()
            answer = Answer(call.number, 0 if trainer is None else trainer.version, error=error)
        with contextlib.suppress(OSError):  # the caller is gone: the next receive says so
            _send(connection, answer)
        if trainer is None:
            return


def _movable(value: Any) -> Any:
    """A result for another process: weights in the memory of the processor."""
    if isinstance(value, PolicyWeights):
        return replace(value, tensors={name: tensor.cpu() for name, tensor in value.tensors.items()})
    return value


def _send(connection: Connection, answer: Answer) -> None:
    """Send a result; of an error that cannot be pickled what it says."""
    try:
        if answer.error is not None:
            pickle.loads(pickle.dumps(answer.error))
        send(connection, answer)
    except OSError:
        raise
    except Exception:  # whatever the class of a user's error does when it is pickled
        told = f"{type(answer.error).__name__}: {answer.error}"
        send(connection, replace(answer, error=StrettoError(told)))


def main(arguments: list[str]) -> int:
    """Run the role."""
    spec = msgspec.json.decode(arguments[0], type=TrainerApartSpec)
    begin_role()
    torch.set_num_threads(spec.threads)
    sys.path += [folder for folder in spec.path if folder not in sys.path and Path(folder).exists()]
    serve(Connection(spec.descriptor))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
