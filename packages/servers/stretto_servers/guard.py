"""Guard process of a server: when the adapter that started it is gone, no process of the server remains.

    adapter ──stdin──► guard ──starts──► server ──starts──► its workers, which outlive a server that was killed

``python -m stretto_servers.guard COMMAND...``: its exit code is the server's (128 + signal if one ended it).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

from stretto.processes.kernel.ends import end_of

_GRACE_SECONDS = 2.0


def main(command: list[str]) -> int:
    """Run the server until it ends, or standard input is closed."""
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(stop, lambda *_: None)  # the end of standard input ends it; SIG_IGN would be the server's too
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
