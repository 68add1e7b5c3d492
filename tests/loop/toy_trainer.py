"""A trainer of another make: ``python -m tests.loop.toy_trainer SPEC``. Speaks the wire, holds no model.

The file ``SPEC.model`` has one line for each process that is started, what it is to do: "works"; "dies" in its first
step; "is killed" or "hangs" (SIGSTOP) before it is ready; "sleeps" or "computes" in its first step, and never ends it;
"lingers", which is to begin like one that works, and slowly;
"grows": the same, by three seconds in which it loads; "loses" a rank once it has published, and ends; "writes" a
checkpoint after the step behind it, "writes nothing" of it and dies, or "cannot write" it; "lags", which is to write
the version of its first step after the next one; "keeps" that version, and dies in the next step; "goes on" from
version 1; "fails" to write it. Whoever is started takes its line away.
"""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from stretto.core.events import Span
from stretto.core.records import Update
from stretto.processes.channel import Failed, RoleEnd
from stretto.processes.heartbeat import begin_role
from stretto.trainer.messages import (
    TO_TRAINER,
    CheckpointFailed,
    CheckpointSaved,
    Copied,
    Publish,
    Published,
    RankLost,
    Ready,
    SaveCheckpoint,
    Stop,
    ToTrainer,
    Train,
    Trained,
)
from tests.loop.toy_engine import load


class ToySpec(msgspec.Struct):
    """What it needs of a `TrainerSpec`, whose module would import torch."""

    model: str
    descriptor: int


def take_a_line(script: Path) -> str:
    first, *others = script.read_text().splitlines()
    script.write_text("\n".join(others))
    return first


def step(part: str, version: int) -> Trained:
    match part:
        case "dies":
            os._exit(9)
        case "sleeps":
            time.sleep(600)
        case "computes":
            while True:
                pass
    return Trained(Update(step=version, version=version, trained_tokens=1, masked_tokens=0, metrics={}), spans=())


def play(text: str) -> None:
    spec = msgspec.json.decode(text, type=ToySpec)
    begin_role()
    part = take_a_line(Path(spec.model))
    version = int(part == "goes on")
    if part == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "hangs":
        time.sleep(0.1)  # it sends a heartbeat first
        os.kill(os.getpid(), signal.SIGSTOP)
    if part == "lingers":
        time.sleep(0.3)
    if part == "grows":
        load()
    channel: RoleEnd[ToTrainer] = RoleEnd(spec.descriptor, TO_TRAINER)
    channel.send(Ready(version=version))
    while (order := channel.receive()) is not None:
        match order:
            case Train():
                version = order.batch.step
                if part == "keeps" and version > 1:
                    return
                channel.send(step(part, version))
                if part == "fails":
                    channel.send(Failed(problem="version 1 cannot be published: no space left", exit_code=1))
                    return
                if part not in ("lags", "keeps") or version > 1:
                    channel.send(Published(version=version))
            case Publish():
                channel.send(Copied(span=Span(role="trainer", name="publish", start=0, end=1)))
                channel.send(Published(version=version))
                if part == "loses":
                    channel.send(RankLost(how="lost rank 1, which was killed by SIGKILL"))
                    return
            case SaveCheckpoint():
                channel.send(Copied(span=Span(role="trainer", name="checkpoint", start=0, end=1)))
                if part == "writes nothing":
                    return
                told: CheckpointSaved | CheckpointFailed = CheckpointSaved(folder=order.folder)
                if part == "cannot write":
                    told = CheckpointFailed(folder=order.folder, problem="no space left", exit_code=1)
                if part == "writes":
                    following = channel.receive()
                    assert isinstance(following, Train)
                    channel.send(told)
                    channel.send(step(part, version := following.batch.step))
                    continue
                channel.send(told)
            case Stop():
                return


def main(arguments: list[str]) -> int:
    play(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
