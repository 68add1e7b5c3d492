"""Messages between a trainer of its own process and the one who calls it: pickled, since both are of one user and
one program.

    Started ─► Answer 0 (ready, or why not) ─► Call 1 ─► Answer 1 ─► Call 2 ─► ...
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from stretto.core.records import Record


class TrainerApartSpec(Record, frozen=True):
    """Arguments of the process. `path`: folders in which modules of the user's losses are looked for."""

    descriptor: int
    threads: int
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """A method of the trainer; of call 0 the arguments are those of its constructor."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    named: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Answer:
    """What a call returned or raised, and the version of the policy after it."""

    number: int
    version: int
    value: Any = None
    error: Exception | None = None


def send(connection: Connection, message: Call | Answer) -> None:
    """Write one.

    Raises:
        pickle.PicklingError, AttributeError, TypeError: a part of it cannot be pickled; nothing was written.
        OSError: the other side has ended.
    """
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Read one.

    Raises:
        EOFError, OSError: the other side has ended.
    """
    return pickle.loads(connection.recv_bytes())
