"""Measurements and choices on record: files of JSON that processes of one run, or of one user, share under a lock."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

log = logging.getLogger(__name__)

_LOCK_SECONDS = 20.0
#: Longest wait for the lock of a run's record, whose holder may compile for minutes: more than a start may take. Who
#: gave up would choose for itself, and round otherwise than the other processes of the run.
RUN_SECONDS = 3600.0
#: What decoding bytes of others with msgspec may raise: bytes of another form, text that is not UTF-8, deep nesting.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

T = TypeVar("T")


@contextmanager
def locked(file: Path, seconds: float | None = None) -> Iterator[bool]:
    """Context manager: hold the lock of a file that is read and written in the block. Yields True; or False, after a
    logged warning, if the file's folder cannot be written or the lock is not free within `seconds` (None: 20): then it
    is not held."""
    with ExitStack() as held:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(file.with_name(f".{file.name}.lock").open("wb"))
            end = time.monotonic() + (_LOCK_SECONDS if seconds is None else seconds)
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.01)
        except OSError as error:
            log.warning("what is measured is not kept in %s, which cannot be written: %s", file, error)
            yield False
        else:
            yield True


def read_choices(file: Path, kind: type[T]) -> dict[str, T]:
    """The choices in a file, by name, each of the type `kind`; empty if the file is missing or damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, kind])  # type: ignore[valid-type]
    except (OSError, *_UNREADABLE):
        return {}


def write_choices(file: Path, choices: dict[str, Any]) -> None:
    """Replace the file by these choices. Raises OSError if the file cannot be written; it then stays as it was."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.format(msgspec.json.encode(choices)) + b"\n")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise
