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

from stretto.core.frames import Count, Moment, Name, Whole
from stretto.core.records import Record
from stretto.loop.records.totals import Tenure

LONGEST_REASON = 64 << 10  #: characters
#: An address, or a path on a machine.
Place = Annotated[str, msgspec.Meta(max_length=4096)]
#: Why something has ended; agents cut it at this length.
Reason = Annotated[str, msgspec.Meta(max_length=LONGEST_REASON)]
#: Seconds of a transfer.
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e7)]

#: Most bytes of a message. (Weights and completions use other connections.)
LARGEST_WORDS = 1 << 20

#: Placeholder in a spec for the agent's own folder of certificates, which only the agent knows.
AGENTS_TLS = "(the agent's folder of certificates)"


class Join(Record, frozen=True, tag=True):
    """A machine with `gpus` GPUs (0: unknown) offers `count` places for roles of a `kind`, "engine" or "rank". `host`:
    its name. `release`: of stretto. `run`: the run that it had joined before, "" at first. `served`: tenure (see
    `Tenure`) of the newest conductor that it has served, None at first."""

    kind: Name
    host: Name  # host name, for display
    count: Count
    release: Name
    run: Name = ""
    served: Tenure | None = None
    gpu: bool = False  # whether it has a GPU
    gpus: Count = 0  # number of visible GPUs; 0: unknown


class Look(Record, frozen=True, tag=True):
    """Question of a conductor of `run`, which listens at `address`, to another one of the same run. The other one
    replies with its own tenure, and ends if `tenure`, the asker's, is newer. `tenure` None: the asker has not begun
    yet."""

    run: Name
    tenure: Tenure | None = None
    address: Name = ""


class Scale(Record, frozen=True, tag=True):
    """Request of `stretto scale RUN engines=N`. `release`: version of stretto of the command."""

    engines: Whole
    release: Name


class Answer(Record, frozen=True, tag=True):
    """Reply to a command: the sentence to print, and whether it succeeded (`done`)."""

    text: str
    done: bool = True


class RunTerms(Record, frozen=True, tag=True):
    """Terms of the run for a machine: where its weights are served, and time limits in seconds. `lease`: of silence,
    after which each side gives up the other; `hung`: without a heartbeat of a role, which is then killed; `pull`:
    without a byte of a pull, which then fails. `mailbox`: name of the weight files. `size`: bytes of a version.
    `published`: newest one, or -1. `delta`: when only the changes between versions are sent. `tenure`: the conductor's,
    which tells newer conductors of the run from older ones. `reference`: machines of ranks fetch the reference model
    too."""

    run: str
    mailbox: str  # name of the run's weight files in shared memory
    weights_port: int  # port of the weights server, on the host of the gate
    weights_key: str
    delta: Literal["auto", "always", "never"]  # whether deltas between versions may be sent
    size: int  # bytes of one version, about
    published: int  # the newest version; -1: none yet
    lease: float
    hung: float
    tenure: Tenure
    pull: float = 600.0  # seconds without a received byte after which a pull fails
    reference: bool = False  # whether a reference policy is served too, for ranks


class RolePlace(Record, frozen=True):
    """Place for one role on a machine: the address at which it listens, and a folder."""

    address: Place
    scratch: Place


class MachineReady(Record, frozen=True, tag=True):
    """The machine has the model (and for ranks the reference policy); roles can be started in `places`. The other
    fields are paths on the machine; `reference` is None for engines, and without a reference policy."""

    places: tuple[RolePlace, ...]
    model: Place
    mailbox_folder: Place
    reference: Place | None = None


class Beat(Record, frozen=True, tag=True):
    """Heartbeat. `sent`: the agent's clock; `clock_offset`: its estimate of the gate's clock minus its own, in seconds.
    `moved`: bytes of the model and of versions that its mirror has received or checked so far."""

    sent: Moment
    clock_offset: Moment
    moved: Count = 0


class Echo(Record, frozen=True, tag=True):
    """Reply to a heartbeat: the heartbeat's `sent`, and `now`, the gate's clock."""

    sent: Moment
    now: Moment


class NewVersion(Record, frozen=True, tag=True):
    """A version was published and can be pulled."""

    version: int


class Mirrored(Record, frozen=True, tag=True):
    """The machine's mailbox (its weight files in shared memory) has a version. Its transfer took `size` bytes over the
    network, and `seconds`."""

    version: Count
    size: Count
    seconds: Seconds


class StartRole(Record, frozen=True, tag=True):
    """Order to start ``python -m MODULE SPEC`` in a place, as the role called `name`. `turn` counts the starts in the
    place, so that late messages about earlier ones are recognised. `spec`: JSON; a field with the value `AGENTS_TLS` is
    replaced by the agent's folder of certificates. `environment`: further variables."""

    place: Whole
    turn: Whole
    name: str
    module: str
    spec: bytes
    threads: int
    environment: dict[str, str]


class StopRole(Record, frozen=True, tag=True):
    place: int
    grace: float  # seconds from SIGTERM to SIGKILL


class KillRole(Record, frozen=True, tag=True):
    place: int


class RoleStarted(Record, frozen=True, tag=True):
    place: Whole
    turn: Whole


class RoleEnded(Record, frozen=True, tag=True):
    """End of the role in a place, or the reason why it could not be started. `killed`: whether a signal ended it."""

    place: Whole
    turn: Whole
    how: Reason
    killed: bool


class LogText(Record, frozen=True, tag=True):
    """New text of a role's log."""

    name: Name
    text: str  # of a role's log, of which the gate keeps 64 MiB


class Leaving(Record, frozen=True, tag=True):
    """The machine wants to leave, and waits until its engines are drained and it is dismissed."""

    why: Reason


class Dismissed(Record, frozen=True, tag=True):
    """The machine's work for this run is over. `again`: it may try to join again."""

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
