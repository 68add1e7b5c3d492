"""The process of a run that was started from Python. It does the same as the command line, and reports to the caller
through a pipe: ``python -m stretto.run_process DESCRIPTOR``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from stretto.core.errors import StrettoError
from stretto.doors.loading import of_application
from stretto.launch.preflight.descriptors import check_descriptors
from stretto.processes.spawn import FRESH
from stretto.run import Order


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as inherited: the caller may ignore it, but stops us with it
    wire = Connection(descriptor)
    order: Order = wire.recv()
    end: object
    try:
        check_descriptors()
        forking = of_application("forking.role:fork_server", lambda: contextlib.nullcontext(FRESH))
        with forking() as spawner, tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            threading.Thread(target=_stop_with_the_caller, args=(wire,), daemon=True).start()
            end = order.carry_out(Path(folder), wire.send, spawner)
    except (StrettoError, OSError) as error:
        end = error
    except SystemExit:
        end = StrettoError("a signal has stopped it")
    except Exception:  # a bug: the caller raises it, with the traceback
        end = StrettoError(traceback.format_exc())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process is about to end anyway
    try:
        wire.send(end)
    except ConnectionError:  # the caller is gone; the run folder has the result
        return


def _stop_with_the_caller(wire: Connection) -> None:
    """Wait until the caller's end of the pipe closes, then send this process SIGTERM. The caller sends nothing after
    its order."""
    try:
        wire.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
