"""Supervised training in a process of its own: the warm start of a run, cached for later runs, `stretto sft` and
`stretto dpo`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

from stretto import __version__
from stretto.core.deadlines import deadline
from stretto.core.errors import RoleDied, RoleFailed, naming, several
from stretto.core.events import SupervisedProgress
from stretto.core.machine import Seat, cache_folder, on_gpus, sync
from stretto.launch.preflight.base import check_cache, digest
from stretto.launch.preflight.plan import Plan
from stretto.processes.channel import ConductorEnd, Failed
from stretto.processes.role import RoleProcess
from stretto.processes.spawn import FRESH, Spawner
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.messages import (
    FROM_SUPERVISED,
    Demonstrations,
    Examples,
    FromSupervised,
    SupervisedDone,
    SupervisedSpec,
)

_PIECE = 1 << 24  # bytes of a file of weights that are in memory at a time
_LESS = "a smaller micro_batch_tokens of its section, or activation_checkpointing = true there, needs less"

OnLearning = Callable[[SupervisedProgress], None]  #: called with the progress of the training


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
    """Train the policy of a model folder on examples, in a process of its own. A process that is killed by a signal or
    hangs is replaced once.

    Args:
        role: name of the process, for messages.
        model: model folder to begin with.
        examples: demonstrations or preferences, as token ids. While the process runs, a hidden file beside `folder` has
            them.
        config: settings: a `SupervisedConfig` for demonstrations, a `PreferenceConfig` for preferences.
        folder: gets the trained policy; it appears once the policy is complete.
        log: log file of the process.
        seed: decides the order of the examples.
        seconds: deadline for the whole training; a process that replaces another has as long again.
        hung: seconds without a heartbeat after which the process is killed.
        on_learning: called with each message of progress.
        spawner: starts the process.
        say: gets a log line if the process is replaced.
        seat: GPU of the process; None: the CPU.

    Raises:
        RoleDied: the process was killed twice, or ended by itself without a result.
        RoleFailed: the process reports an error.
        DeadlineExceeded: the training took more than `seconds`.
        OSError: the file of the examples cannot be written.
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
    """Call `on_learning` with the messages of progress, until the process says that it is done. Raises RoleDied if it
    ends before, RoleFailed if it reports an error, DeadlineExceeded if it takes longer than `seconds`."""
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


async def warm_start(
    plan: Plan,
    log: Path,
    on_learning: OnLearning,
    spawner: Spawner = FRESH,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Return the folder of the policy with which a run starts: the result of the warm start, from the cache or trained
    now; without a warm start in the recipe, the folder of the base model.

    Args:
        log: log file of the process that trains.
        on_learning: called with each message of its progress.
        spawner: starts the process.
        say: gets a log line: cached or trained now; and one if the process is replaced.

    Raises:
        RecipeError: the cache cannot be written.
        RoleDied, RoleFailed: the process ended without a result, or reported an error.
        DeadlineExceeded: the training took longer than `deadlines.warm_start`.
    """
    if plan.recipe.warm_start is None:
        return plan.base.path
    folder = cache_folder() / "warm-starts" / warm_start_key(plan)
    if folder.exists():
        say(f"phase 1 of 3: warm start, cached by an earlier run in {folder}")
    else:
        check_cache()
        steps, count = plan.recipe.warm_start.steps, len(plan.demonstrations)
        learns = f"{several(steps, 'supervised step')} on {several(count, 'demonstration')}"
        say(f"phase 1 of 3: warm start, {learns}; cached in {folder}")
        await fine_tune_to(plan, folder, log, on_learning, spawner, say)
    return folder


def warm_start_key(plan: Plan) -> str:
    """Compute a digest of everything that determines the result of the warm start: base model, demonstrations,
    settings, seed, and version of stretto. It names the folder in the cache. The recipe must have a warm start."""
    recipe = plan.recipe
    assert recipe.warm_start is not None
    weights = xxhash.xxh3_128()
    for file in sorted(path for path in plan.base.path.iterdir() if path.is_file()):
        weights.update(file.name.encode())
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                weights.update(piece)
    shown = xxhash.xxh3_128(msgspec.msgpack.encode(plan.demonstrations)).hexdigest()
    return digest(__version__, weights.hexdigest(), shown, recipe.warm_start.model_dump_json(), recipe.seed)


async def fine_tune_to(
    plan: Plan,
    folder: Path,
    log: Path,
    on_learning: OnLearning,
    spawner: Spawner,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Train the base model of the plan on its demonstrations, by the section ``[warm_start]``, which the recipe must
    have. `folder` appears once the policy in it is complete. Other arguments are those of `train_in_process`.

    Raises:
        RoleDied, RoleFailed: the process ended without a result, or reported an error.
        DeadlineExceeded: the training took longer than `deadlines.warm_start`.
    """
    recipe = plan.recipe
    assert recipe.warm_start is not None
    await train_in_process(
        "warm start",
        plan.base.path,
        Demonstrations(examples=plan.demonstrations),
        recipe.warm_start,
        folder,
        log,
        seed=recipe.seed,
        seconds=recipe.deadlines.warm_start,
        hung=recipe.deadlines.hung,
        on_learning=on_learning,
        spawner=spawner,
        say=say,
        seat=plan.warm_seat,
    )


def copy_policy(source: Path, target: Path, copied: Callable[[Path], None] = lambda part: None) -> None:
    """Copy a policy folder to `target`, which must not exist, completely or not at all, and sync it to disk. `copied`:
    called with the folder of the finished copy, before it is renamed to `target`; if it raises, there is no
    `target`."""
    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    for path in (*part.rglob("*"), part):  # no checkpoint is of use without it
        sync(path)
    copied(part)
    part.rename(target)
    sync(target.parent)
