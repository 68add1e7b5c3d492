"""Do something as an ordinary user, in a process of its own."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stretto_verify.sandbox.cgroups import find_hierarchies

ORDINARY = 61_000
_PR_SET_DUMPABLE = 4


@contextmanager
def delegated_groups(uid: int | None) -> Iterator[list[Path]]:
    """Control groups that belong to the user, as an administrator would hand them down; none if they cannot be made."""
    folders: list[Path] = []
    try:
        with contextlib.suppress(OSError):
            for hierarchy in find_hierarchies() if uid is not None else ():
                folder = hierarchy.folder / f"delegated-{os.getpid()}"
                folder.mkdir()
                folders.append(folder)
                for path in (folder, folder / "cgroup.procs"):
                    os.chown(path, uid or 0, uid or 0)
        yield folders
    finally:
        for folder in folders:
            folder.rmdir()


def as_user(uid: int | None, work: Callable[[], str], groups: Sequence[Path] = ()) -> str:
    """What `work` returns when the user `uid` does it, in these control groups; `None`: whoever runs the tests.

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
            for group in groups:
                (group / "cgroup.procs").write_text(str(os.getpid()))
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
