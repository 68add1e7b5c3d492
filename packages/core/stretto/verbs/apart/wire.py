"""Messages between a caller and a trainer in a process of its own. They are pickled: both processes belong to one user
and one program, so they trust each other.

    call 0: the arguments of the trainer ─► result 0 ─► call 1: a method of the trainer ─► result 1 ─► ...

The arguments of a call are pickled separately, within the message: if the process cannot unpickle them, only this call
fails.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

#: (number of the call, name of the method, pickled positional and keyword arguments).
TrainerCall = tuple[int, str, bytes]
#: Name in place of a method: restore the gradient from before the last call.
UNDO = "undo"
#: (number of the call, version of the policy after it, returned value, raised error).
CallResult = tuple[int, int, Any, Exception | None]
#: Arguments of the process: (descriptor of its connection, number of threads, folders for `sys.path`).
TrainerArguments = tuple[int, int, tuple[str, ...]]


def send(connection: Connection, message: TrainerCall | CallResult) -> None:
    """Write one message.

    Raises:
        OSError: the other side has ended.
    """
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Read one message.

    Raises:
        EOFError, OSError: the other side has ended.
    """
    return pickle.loads(connection.recv_bytes())
