"""What the conductor and the trainer's process say to each other, and what a role is started with."""

from __future__ import annotations

import msgspec

from stretto.core.events import Span
from stretto.core.records import Batch, Record, Update


class Train(Record, frozen=True, tag=True):
    """Take this batch; update; publish the next version; answer `Trained`."""

    batch: Batch


class SaveCheckpoint(Record, frozen=True, tag=True):
    """Write everything that training needs to go on into this folder; answer `Saved`."""

    folder: str


class SavePolicy(Record, frozen=True, tag=True):
    """Write the policy as a Hugging Face folder; answer `Saved`."""

    folder: str


class Stop(Record, frozen=True, tag=True):
    """End the process."""


class Ready(Record, frozen=True, tag=True):
    """The role is up and has published (trainer) its version."""

    version: int


class Trained(Record, frozen=True, tag=True):
    """The next version is published."""

    update: Update
    spans: tuple[Span, ...]


class Saved(Record, frozen=True, tag=True):
    folder: str
    span: Span


class Failed(Record, frozen=True, tag=True):
    """The role cannot go on. `problem` is meant for the user; the traceback is in the role's log."""

    problem: str
    exit_code: int


ToTrainer = Train | SaveCheckpoint | SavePolicy | Stop
FromTrainer = Ready | Trained | Saved | Failed

TO_TRAINER: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
FROM_TRAINER: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
