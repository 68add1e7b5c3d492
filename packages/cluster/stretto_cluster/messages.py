"""Messages between the gate and agents, commands and other conductors, in frames of MessagePack.

agent ──► gate      Join (in the handshake), MachineReady, Beat, Mirrored, RoleStarted, RoleEnded, LogText, Leaving
gate ──► agent      RunTerms, Echo, NewVersion, StartRole, StopRole, KillRole, Dismissed
command ──► gate    Scale (in the handshake)
conductor ──► gate  Look (in the handshake)
gate ──► command    Answer
gate ──► conductor  Tenure
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from stretto.core.records import Record
from stretto.loop.records.tenure import Tenure

#: Valid range of clocks and byte counts; a message with another number is invalid.
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e7)]
Offset = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]

#: Bytes of a message: weights and completions go other ways.
LARGEST_WORDS = 1 << 20

#: In a spec: the folder of certificates on the agent's machine, which the agent alone knows.
AGENTS_TLS = "(the agent's folder of certificates)"


class Join(Record, frozen=True, tag=True):
    """A machine offers places for roles. `run`: the run that it had joined before, "" at first; `served`: the newest
    conductor that it served."""

    kind: str  # "engine" or "rank"
    host: str  # its name, for people
    count: int  # places
    release: str  # of stretto
    run: str = ""
    served: Tenure | None = None
    gpu: bool = False  # whether it has one
    gpus: int = 0  # how many it shows; 0: unknown


class Look(Record, frozen=True, tag=True):
    """Another conductor of `run`, at `address`, asks for this one's tenure; without a tenure of its own it has not
    begun, and only asks."""

    run: str
    tenure: Tenure | None = None
    address: str = ""


class Scale(Record, frozen=True, tag=True):
    """Request of `stretto scale RUN engines=N`."""

    engines: int
    release: str


class Answer(Record, frozen=True, tag=True):
    """Reply to a command: the sentence to print, and whether it succeeded (`done`)."""

    text: str
    done: bool = True


class RunTerms(Record, frozen=True, tag=True):
    """Terms of the run for a machine: where its weights are served, and how long silence may last."""

    run: str
    mailbox: str  # the name of the run's files in shared memory
    weights_port: int  # at the host where it found the gate
    weights_key: str
    delta: Literal["auto", "always", "never"]  # whether differences of versions may travel
    size: int  # bytes of one version, about
    published: int  # the newest version; -1: none yet
    lease: float
    hung: float
    tenure: Tenure
    pull: float = 600.0  # seconds without a byte of a version, or of the model, that is pulled
    reference: bool = False  # whether a reference policy is served too, for ranks


class RolePlace(Record, frozen=True):
    """Place for one role: the address to listen at, and a folder."""

    address: str
    scratch: str


class MachineReady(Record, frozen=True, tag=True):
    """The machine has the model, and for ranks the reference policy; roles can be started in these places."""

    places: tuple[RolePlace, ...]
    model: str
    mailbox_folder: str
    reference: str | None = None


class Beat(Record, frozen=True, tag=True):
    """Heartbeat with the sender's clock and its estimate of the gate's clock minus its own, in seconds. `moved`: bytes
    of versions received, which grow during a pull."""

    sent: Offset
    clock_offset: Offset
    moved: Count = 0


class Echo(Record, frozen=True, tag=True):
    """Reply to a heartbeat: its `sent`, and the gate's clock."""

    sent: float
    now: float


class NewVersion(Record, frozen=True, tag=True):
    """A version is published."""

    version: int


class Mirrored(Record, frozen=True, tag=True):
    """The machine's mailbox has a version, after `size` bytes over the network in `seconds`."""

    version: Count
    size: Count
    seconds: Seconds


class StartRole(Record, frozen=True, tag=True):
    """Order to start ``python -m MODULE SPEC`` in a place. `turn` numbers the starts in the place, to recognise late
    messages of earlier ones. A field of the spec with the value `AGENTS_TLS` is replaced by the agent's folder of
    certificates."""

    place: int
    turn: int
    name: str
    module: str
    spec: bytes
    threads: int
    environment: dict[str, str]


class StopRole(Record, frozen=True, tag=True):
    place: int
    grace: float


class KillRole(Record, frozen=True, tag=True):
    place: int


class RoleStarted(Record, frozen=True, tag=True):
    place: int
    turn: int


class RoleEnded(Record, frozen=True, tag=True):
    """How the role in a place ended, or why it could not be started; `killed`: by a signal."""

    place: int
    turn: int
    how: str
    killed: bool


class LogText(Record, frozen=True, tag=True):
    """New text of a role's log."""

    name: str
    text: str


class Leaving(Record, frozen=True, tag=True):
    """The machine wants to leave, and waits until its engines are drained."""

    why: str


class Dismissed(Record, frozen=True, tag=True):
    """The machine's work for this run is over; `again`: it may come back."""

    why: str
    again: bool = False


FromCaller = Join | Scale | Look
FromAgent = MachineReady | Beat | Mirrored | RoleStarted | RoleEnded | LogText | Leaving
ToAgent = RunTerms | Echo | NewVersion | StartRole | StopRole | KillRole | Dismissed

FROM_CALLER: msgspec.msgpack.Decoder[FromCaller] = msgspec.msgpack.Decoder(FromCaller)
FROM_AGENT: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
TO_AGENT: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
TENURE: msgspec.msgpack.Decoder[Tenure] = msgspec.msgpack.Decoder(Tenure)
