"""Do something as an ordinary user, in a process of its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

ORDINARY = 61_000
_PR_SET_DUMPABLE = 4


def as_user(uid: int | None, work: Callable[[], str]) -> str:
    """What `work` returns when the user `uid` does it; `None`: whoever runs the tests.

    Raises:
        AssertionError: it raised something.
    """
    if uid is None:
        return work()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        words = "the process ended early"
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # as of a process that never was root
            words = f"+{work()}"
        except BaseException as error:
            words = f"-{type(error).__name__}: {error}"
        finally:
            os.write(tell, words.encode())
            os._exit(0)
    os.close(tell)
    with open(told, "rb") as pipe:
        words = pipe.read().decode()
    os.waitpid(child, 0)
    assert words.startswith("+"), words
    return words[1:]
