"""The process of a run that was started from Python. It does the same as the command line, and reports to the caller
through a pipe: ``python -m stretto.api.run_process DESCRIPTOR``.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from stretto.api.run import EvaluationOrder, TrainOrder
from stretto.core.errors import StrettoError
from stretto.launch.preflight.descriptors import check_descriptors
from stretto.processes.fork_server_role import fork_server
from stretto.processes.spawn import Spawner


def main() -> None:
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as inherited: the caller may ignore it, but stops us with it
    wire = Connection(descriptor)
    order: TrainOrder | EvaluationOrder = wire.recv()
    end: object
    try:
        check_descriptors()
        with fork_server() as spawner, tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            threading.Thread(target=_stop_with_the_caller, args=(wire,), daemon=True).start()
            end = _trained(order, Path(folder), wire, spawner) if isinstance(order, TrainOrder) else None
            end = _evaluated(order, Path(folder), spawner) if isinstance(order, EvaluationOrder) else end
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


def _trained(order: TrainOrder, folder: Path, wire: Connection, spawner: Spawner) -> int:
    from stretto.launch.commands.train import prepare
    from stretto.loop.records.reporter import SilentReporter

    recipe = folder / f"{order.name}.toml"
    recipe.write_text(order.recipe, encoding="utf-8")
    prepared = prepare(recipe, (), Path(order.run_dir) if order.run_dir else None, order.resume)
    wire.send(str(prepared.path.resolve()))
    return prepared.train(SilentReporter(), spawner)


def _evaluated(order: EvaluationOrder, folder: Path, spawner: Spawner) -> object:
    from stretto.launch.commands.evaluate import evaluate

    task = Path(order.task)
    if not order.is_path:
        task = folder / "recipe.toml"
        task.write_text(order.task, encoding="utf-8")
    return evaluate(Path(order.model), task, order.overrides, spawner)


def _stop_with_the_caller(wire: Connection) -> None:
    """Send this process SIGTERM when the caller's end of the pipe closes. The caller sends nothing after its order."""
    try:
        wire.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
