"""The warm start's process: ``python -m stretto.launch.supervised_role SPEC``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch

from stretto.core.lifeline import die_with_parent, keep_beating
from stretto.core.records import Record
from stretto.launch.channel import RoleEnd
from stretto.launch.messages import Failed, Stop
from stretto.launch.playing import play
from stretto.model.folder import load_policy, save_policy
from stretto.model.packed import PACKED_ATTENTION
from stretto.trainer.config import SupervisedConfig
from stretto.trainer.supervised import Demonstration, Progress, fine_tune

_TELL_SECONDS = 0.5


class SupervisedSpec(Record, frozen=True):
    """What the process is started with; `demonstrations` is a file of `Demonstrations`."""

    parent: int
    model: str
    demonstrations: str
    out: str
    config: str
    seed: int
    threads: int
    descriptor: int


class Demonstrations(Record, frozen=True):
    examples: tuple[Demonstration, ...]


class Learning(Record, frozen=True, tag=True):
    """How far it is; `loss` in nats per answer token."""

    step: int
    steps: int
    loss: float
    seconds: float


class Learnt(Record, frozen=True, tag=True):
    """The policy is in its folder."""


FromSupervised = Learning | Learnt | Failed

FROM_SUPERVISED: msgspec.msgpack.Decoder[FromSupervised] = msgspec.msgpack.Decoder(FromSupervised)
_NO_ORDERS: msgspec.msgpack.Decoder[Stop] = msgspec.msgpack.Decoder(Stop)


class Teller:
    """Tells the conductor how it goes, twice a second."""

    def __init__(self, channel: RoleEnd[Stop]) -> None:
        self._channel = channel
        self._start = self._told = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS or progress.step == progress.steps:
            self._told = now
            self._channel.send(
                Learning(step=progress.step, steps=progress.steps, loss=progress.loss, seconds=now - self._start)
            )


def learn(spec: SupervisedSpec, channel: RoleEnd[Stop]) -> None:
    """Load, fine-tune, save."""
    config = SupervisedConfig.model_validate_json(spec.config)
    shown = msgspec.msgpack.decode(Path(spec.demonstrations).read_bytes(), type=Demonstrations)
    model = load_policy(Path(spec.model), attention=PACKED_ATTENTION, dtype=torch.float32, device=config.device)
    fine_tune(model, shown.examples, config, seed=spec.seed, progress=Teller(channel))
    save_policy(model, Path(spec.model), Path(spec.out))
    channel.send(Learnt())


def main(arguments: list[str]) -> int:
    """Play the role; see `launch.playing`."""
    spec = msgspec.json.decode(arguments[0], type=SupervisedSpec)
    die_with_parent(spec.parent)
    keep_beating()
    torch.set_num_threads(spec.threads)
    channel: RoleEnd[Stop] = RoleEnd(spec.descriptor, _NO_ORDERS)
    return play(lambda: learn(spec, channel), channel.send)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
