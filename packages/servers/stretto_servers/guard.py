"""Guard process of a server: kills the server's process group when the server or the adapter has ended.

    adapter ──stdin──► guard ──starts──► server ──starts──► its workers, which would outlive a killed server

``python -m stretto_servers.guard COMMAND...`` exits with the server's code (128 + signal if a signal ended it).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

from stretto.processes.kernel import end_of

_GRACE_SECONDS = 2.0


def main(command: list[str]) -> int:
    """Run the server's `command` until it ends or standard input is closed, then kill its process group; returns the
    server's exit code, or 128 + the signal that ended it. When standard input is closed, the server gets SIGTERM first,
    and SIGKILL after two seconds."""
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(stop, lambda *_: None)  # only the end of stdin ends it; the server would inherit SIG_IGN
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, restore_signals=True)
    ended = end_of(server.pid)
    try:
        readable, _, _ = select.select([0, ended], [], [])
        if ended not in readable:
            server.terminate()
            select.select([ended], [], [], _GRACE_SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
    code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
