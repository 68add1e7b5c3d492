"""Messages between a trainer in a process of its own and the one who calls it: pickled, since both are of one user and
one program.

    call 0: the arguments of the trainer ─► result 0 ─► call 1: a method of it ─► result 1 ─► ...

Arguments are pickled by themselves: those that the process cannot read are the error of their call.
"""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection
from typing import Any

#: A number, the name of a method, and its arguments (by place and by name), pickled.
TrainerCall = tuple[int, str, bytes]
#: In place of a method: the gradient is that of before the last call again.
UNDO = "undo"
#: The number of the call, the version of the policy after it, what it returned, and what it raised.
CallResult = tuple[int, int, Any, Exception | None]
#: Of the process: the descriptor of its connection, threads, folders in which modules of the user are looked for.
TrainerArguments = tuple[int, int, tuple[str, ...]]


def send(connection: Connection, message: TrainerCall | CallResult) -> None:
    """Write one.

    Raises:
        OSError: the other side has ended.
    """
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Read one.

    Raises:
        EOFError, OSError: the other side has ended.
    """
    return pickle.loads(connection.recv_bytes())
