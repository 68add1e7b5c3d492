"""A role that does as its spec says: ``python -m tests.processes.stubborn_role SPEC``."""

import atexit
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec

from stretto.core.records import Record
from stretto.processes import heartbeat


class StubbornSpec(Record, frozen=True):
    """Ignore SIGTERM or not, give signs of life or not and `pause` seconds apart, start a child that sleeps or not and
    log its number, leave a thread and a handler behind that print or not; then end with `code` after `seconds`, by a
    signal if it is negative."""

    ignores: bool = False
    seconds: float = 60.0
    code: int = 0
    beats: bool = False
    pause: float = 1.0
    child: bool = False
    late: bool = False


def main(arguments: list[str]) -> int:
    spec = msgspec.json.decode(arguments[0], type=StubbornSpec)
    if spec.ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if spec.beats:
        heartbeat.HEARTBEAT_SECONDS = spec.pause
        heartbeat.send_heartbeats()
    child = subprocess.Popen(["sleep", "60"]) if spec.child else None
    print("up" if child is None else child.pid, flush=True)
    if spec.late:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - it keeps what is printed until it is full
        atexit.register(print, "handler")
        threading.Timer(0.2, print, ["thread"]).start()
    time.sleep(spec.seconds)
    if spec.code < 0:
        os.kill(os.getpid(), -spec.code)
    return spec.code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
