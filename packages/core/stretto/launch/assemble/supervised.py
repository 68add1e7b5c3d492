"""Running supervised training in a process of its own: for a warm start, `stretto sft` and `stretto dpo`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from stretto.core.deadlines import deadline
from stretto.core.errors import Problem, RoleDied, RoleFailed, RunFolderError, naming
from stretto.core.events import SupervisedProgress
from stretto.core.machine import on_gpus
from stretto.core.placement import Seat
from stretto.processes.channel import ConductorEnd
from stretto.processes.role import RoleProcess
from stretto.processes.run_role import Failed
from stretto.processes.spawn import FRESH, Spawner
from stretto.processes.stopping import StopSignal, until_cut_short
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.messages import FROM_SUPERVISED, Examples, FromSupervised, SupervisedDone
from stretto.trainer.spec import SupervisedSpec

_LESS = "a smaller micro_batch_tokens of its section, or activation_checkpointing = true there, needs less"

OnLearning = Callable[[SupervisedProgress], None]


async def train_in_process(
    role: str,
    model: Path,
    examples: Examples,
    config: OptimizerConfig,
    folder: Path,
    log: Path,
    *,
    seed: int,
    seconds: float,
    hung: float,
    on_learning: OnLearning,
    spawner: Spawner = FRESH,
    say: Callable[[str], None] = lambda text: None,
    seat: Seat | None = None,
) -> None:
    """Train the policy of a model folder on examples, in a process of its own. A process that is killed or hangs is
    replaced once.

    Args:
        role: name of the process, for messages.
        model: model folder to begin with.
        examples: demonstrations or preferences, as token ids.
        folder: gets the trained policy; it appears once the policy is complete.
        log: log file of the process.
        seconds: deadline for the whole training.
        hung: seconds without a heartbeat after which the process is killed.
        on_learning: called with the progress.
        say: gets a log line if the process is replaced.
        seat: GPU of the process; None: the CPU.

    Raises:
        RoleDied: the process was killed twice.
        RoleFailed: the process reports an error.
        DeadlineExceeded: the training took more than `seconds`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    shown = folder.with_name(f".{folder.name}.{os.getpid()}.examples")
    process = RoleProcess(role, "stretto.trainer.roles.supervised", log, hung, spawner)
    spec = SupervisedSpec(
        model=str(model),
        examples=str(shown),
        out=str(folder),
        config=config.model_dump_json(),
        seed=seed,
        threads=config.threads,
        role=role,
        gpus=seat.ids if seat is not None else (),
    )
    for again in (True, False):
        channel: ConductorEnd[FromSupervised] = ConductorEnd(role, FROM_SUPERVISED, str(log))
        spec = msgspec.structs.replace(spec, descriptor=channel.far.fileno())
        try:
            with naming(shown):
                shown.write_bytes(msgspec.msgpack.encode(examples))
            await process.start(spec, spec.threads, (spec.descriptor,), on_gpus(spec.gpus))
            await channel.open(process.ended)
            return await _follow(channel, process, seconds, on_learning)
        except RoleDied as death:
            if not (again and process.killed):
                raise
            say(f"{role} {death.how}; it is started again")
        finally:
            channel.close()
            await process.stop(grace=1.0)
            shown.unlink(missing_ok=True)
    return None


async def _follow(
    channel: ConductorEnd[FromSupervised], process: RoleProcess, seconds: float, on_learning: OnLearning
) -> None:
    awaited = "to train on the examples"
    async with deadline("conductor", f"{channel.role} {awaited}", seconds):
        while True:
            try:
                message = await channel.receive(awaited, seconds)
            except RoleDied:
                raise RoleDied(channel.role, await process.last_words(), str(process.log)) from None
            match message:
                case SupervisedProgress():
                    on_learning(message)
                case SupervisedDone():
                    return
                case Failed():
                    less = f"; {_LESS}" if message.again else ""
                    raise RoleFailed(channel.role, f"{message.problem}{less}", message.exit_code)


def refuse_old(out: Path) -> None:
    """Check that the output folder of a command does not exist.

    Raises:
        RunFolderError: it exists.
    """
    if out.exists():
        raise RunFolderError([Problem(str(out), "exists already", "give a new folder")])


def train_into(out: Path, training: Callable[[Path], Coroutine[Any, Any, None]]) -> None:
    """Run a training that writes the folder `out`, until it is done or a signal stops it.

    `training`: takes the path of the log file and returns the coroutine to run.

    Raises:
        RunFolderError: the folder cannot be written.
        SystemExit: a signal stopped the training; `out` does not exist.
    """

    async def until_stopped() -> None:
        stopped = StopSignal()
        await stopped.unless(training(out.with_name(f"{out.name}.log")))
        if stopped.requested:
            sys.exit(stopped.exit_code)

    try:
        until_cut_short(until_stopped())
    except OSError as error:
        place = str(error.filename or out)
        raise RunFolderError([Problem(place, f"cannot be written: {error.strerror}", "give another folder")]) from error
