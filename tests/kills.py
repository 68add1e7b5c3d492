"""A process that is killed before one of its writes."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.truncate", "sqlite3.connect")


def killed_at_each_write(work: Callable[[], object]) -> Iterator[int]:
    """Run `work` in forked processes: the n-th is killed before its n-th change of the file system. Yields n after each
    kill; the caller looks at what is left, and puts it back as it was. Ends after the process that was not killed."""
    number = 0
    while True:
        number += 1
        child = os.fork()
        if child == 0:
            _work(work, number)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert status == 0, "the work failed by itself"
            return
        yield number


def _work(work: Callable[[], object], number: int) -> None:
    left = number

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in _CHANGES or writes:
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

    code = 1
    try:
        sys.addaudithook(count)
        work()
        code = 0
    finally:
        os._exit(code)
