"""Engines on machines that have joined the run."""

from __future__ import annotations

import asyncio
import math
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import numpy as np

from stretto.core.canary import FARTHEST, Ask, Loaded
from stretto.core.engine import MOST_INTERRUPTIONS, EngineHealth
from stretto.core.errors import (
    DeadlineExceeded,
    EngineLeft,
    EngineLied,
    EngineLost,
    MachineLost,
    RefusedRequest,
    WireError,
)
from stretto.core.records import Completion, GenerateRequest, Partials, Segment
from stretto.engine.http.client import HttpEngine
from stretto.engine.wire import ENGINE_KEY, EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.handle import EngineHandle
from stretto.loop.engines.proving import Proving
from stretto.processes.supervisor import RestartBudget
from stretto_cluster.machine import SILENT_SECONDS, JoinedMachine

_NEWS_SECONDS = 0.5
_ROUNDING = 1e-3  # largest accepted log-probability; rounding in half precision may give more than 0
_ID = 4  # bytes of a token id (`core.columns`)


class GuestEngine(HttpEngine):
    """Client of an engine on another machine. A version is transferred to the machine before the engine pauses to load
    it. Replies are checked, because the machine is not trusted."""

    def __init__(
        self,
        spec: EngineSpec,
        machine: JoinedMachine,
        deadlines: DeadlinesConfig,
        key: str,
        context: ssl.SSLContext | None,
        newest: Callable[[], int],
        vocabulary: int,
    ) -> None:
        """Create the client of the engine `spec` on `machine`. `newest` returns the newest published version; an engine
        that claims a newer one is refused. `key`: the engine's API key; `context`: for TLS, None without. `vocabulary`:
        number of the model's token ids."""
        super().__init__(
            spec.name,
            spec.address,
            answer_seconds=deadlines.answer,
            load_seconds=deadlines.load,
            health_seconds=deadlines.answer,
            key=key,
            context=context,
        )
        self._machine, self._newest, self._vocabulary = machine, newest, vocabulary
        self._pull_seconds, self._pulls = deadlines.longest_pull, False
        self._asked: dict[str, GenerateRequest] = {}  # open requests

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Generate the completions of the requests, and yield each one when it ends and has passed the checks. Unlike
        an engine of this machine, one that does not reply in time is lost instead of ending the run.

        Raises:
            EngineLied: it sent a completion that was not requested, twice, that is longer than requested, that does not
                begin with the tokens of its request, with tokens that the model does not have, or whose versions are
                missing, fall or are not published.
            EngineLeft: its machine is lost.
            EngineLost: the engine is lost, or does not reply in time.
            RefusedRequest: the engine refused a request.
        """
        asked = {request.id: request for request in requests}
        self._asked |= asked
        try:
            async for completion in super().generate(*requests):
                yield completion
        except (RefusedRequest, EngineLied):
            raise
        except (EngineLost, DeadlineExceeded, WireError) as loss:
            how = loss.how if isinstance(loss, EngineLost) else str(loss)
            raise (EngineLeft if await self._machine_is_gone() else EngineLost)(self.name, how) from None
        finally:
            for id in asked:
                self._asked.pop(id, None)

    def _check_all(
        self, arrived: Sequence[Completion], asked: Mapping[str, GenerateRequest], had: set[tuple[str, int]]
    ) -> None:
        """Raise EngineLied if one of the completions that arrived together is refused by `_check`, was `had` before, or
        has tokens that cannot be. `asked`: the requests, by id. Completions that pass are added to `had`."""
        for completion in arrived:
            self._check(completion, asked.get(completion.request))
            if (one := (completion.request, completion.member)) in had:
                raise EngineLied(self.name, f"sent a completion of {completion.request!r} twice")
            had.add(one)
        try:
            self._check_tokens([(completion.request, completion.segment) for completion in arrived])
        except WireError as lie:
            raise EngineLied(self.name, str(lie)) from None

    def _check(self, completion: Completion, request: GenerateRequest | None) -> None:
        """Raise EngineLied if a completion was not requested (`request` None, or another member), does not begin with
        the tokens that its request has for it, or is one that `_check_segment` refuses."""
        if request is None or not 0 <= completion.member < len(request.seeds):
            raise EngineLied(self.name, f"sent a completion of {completion.request!r} that it was not asked for")
        if request.prefixes and not completion.segment.begins_with(request.prefixes[completion.member]):
            how = f"sent a completion of {completion.request!r} that does not go on with its tokens"
            raise EngineLied(self.name, how)
        try:
            self._check_segment(completion.segment, request.id, request.sampling.max_tokens)
        except WireError as lie:
            raise EngineLied(self.name, str(lie)) from None

    def _check_segment(self, segment: Segment, request: str, most: float) -> None:
        """Check new tokens for the request with the id `request`: their number, at most `most`, their versions, and the
        number of their interruptions.

        Raises:
            WireError: names what is wrong.
        """
        if segment.length > most:
            raise WireError(f"sent {segment.length:,} tokens of {request!r}, of which {most:,} are left to sample")
        if segment.length and not segment.sampled:
            raise WireError(f"sent tokens of {request!r} without a log-probability and a version for each")
        stamps = [version for version, _ in segment.stamps]
        if len(stamps) > 1 and stamps != sorted(stamps):
            raise WireError(f"sent tokens of {request!r} whose versions fall")
        if stamps and not 0 <= stamps[0] <= stamps[-1] <= self._newest():
            raise WireError(f"sent tokens of {request!r} with versions that are not published")
        if segment.interrupted > MOST_INTERRUPTIONS:  # no engine would continue them
            raise WireError(f"sent tokens of {request!r} that were interrupted {segment.interrupted:,} times")

    def _check_tokens(self, sent: Sequence[tuple[str, Segment]]) -> None:
        """Check ids and log-probabilities of new tokens, given with the ids of their requests. Once they are in a batch
        nobody can drop them, and a token that the model does not have would end every trainer that is given the batch.

        Raises:
            WireError: names the request of the first segment that is wrong.
        """
        if _are_possible([segment for _, segment in sent], self._vocabulary):
            return
        request = next(id for id, segment in sent if not _are_possible([segment], self._vocabulary))
        raise WireError(f"sent tokens of {request!r} that the model does not have, or with no log-probabilities")

    def _check_published(self, version: int) -> None:
        if version > self._newest():
            raise WireError(f"{self.name} says that it has version {version}, and the newest is {self._newest()}")

    async def health(self) -> EngineHealth:
        """Ask for the engine's version, load and counters.

        Raises:
            EngineLied: the engine claims an unpublished version, or the reply is none that an engine sends.
            EngineLost: it cannot be reached, or the connection broke.
            DeadlineExceeded: it does not reply in time.
        """
        health = await super().health()
        try:
            self._check_published(health.version)
        except WireError as lie:
            raise EngineLied(self.name, f"told nonsense about itself: {lie}") from None
        return health

    async def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """Ask for the new tokens of unfinished completions, by request and member. `known`: number of tokens of each
        member that the caller has, by request. Raises WireError for completions that were not requested, and for tokens
        that `_check_segment` or `_check_tokens` refuses."""
        found = await super().partials(known)
        for request, pieces in found.items():
            if request not in known or any(member not in range(len(known[request])) for member in pieces):
                raise WireError(f"{self.name} sent tokens of {request!r} that it was not asked for")
            asked = self._asked.get(request)  # None: it has ended meanwhile
            for member, piece in pieces.items():
                left = math.inf if asked is None else asked.sampling.max_tokens - known[request][member]
                self._check_segment(piece, request, left)
        self._check_tokens([(request, piece) for request, pieces in found.items() for piece in pieces.values()])
        return found

    async def _machine_is_gone(self) -> bool:
        """Whether the machine is lost: it has been silent for four seconds, or its loss comes within half a second.
        (Connections to its engines may break before the connection to its agent.)"""
        if self._machine.silence > SILENT_SECONDS:
            return True
        await asyncio.wait([self._machine.lost], timeout=_NEWS_SECONDS)
        return self._machine.lost.done()

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        """Wait until the machine has pulled `version`, then make the engine load it. If the machine has a newer version
        by then, the engine loads that one. During the pull, the engine samples with its old version.

        Returns the version in use, and the engine's scores. `ask` returns the challenge for a version: tokens that the
        engine scores, to prove its weights. None: no challenge.

        Raises:
            EngineLost: the machine is lost, or its pull made no progress within its time limit.
            DeadlineExceeded: the load made no progress within its time limit.
            WireError: the engine claims an unpublished version.
        """
        try:
            self._pulls = True
            version = await self._machine.until_mirrored(version, self._pull_seconds)
            self._pulls = False
        except (MachineLost, DeadlineExceeded) as loss:
            raise EngineLost(self.name, str(loss)) from None
        loaded = await super().update(version, ask)
        self._check_published(loaded.version)
        return loaded

    async def moved(self) -> object:
        """Progress of an update, as a value that changes while it goes on: during the pull the bytes that have arrived
        on the machine, then what the engine reports."""
        waits = self._pulls or self._machine.mirrored < 0
        return self._machine.moved if waits else await super().moved()


def _are_possible(segments: Sequence[Segment], vocabulary: int) -> bool:
    """Whether all tokens of sampled segments are of the vocabulary, each with a finite log-probability of 0 at most
    (0.001 for rounding). The segments are compared together, because a call of NumPy costs as much as a thousand
    tokens."""
    parts = [(memoryview(one.columns), _ID * one.length) for one in segments if one.length]
    if not parts:
        return True
    most, least = np.maximum.reduce, np.minimum.reduce  # as `max` and `min`, without two calls of Python for each
    ids = np.frombuffer(b"".join([columns[:end] for columns, end in parts]), np.uint32)  # a negative id is a large one
    if not most(ids) < vocabulary:
        return False
    for kind, wide in (("<f4", False), ("<f8", True)):
        if alike := [columns[end:] for columns, end in parts if (len(columns) > 2 * end) is wide]:
            logprobs = np.frombuffer(b"".join(alike), kind)
            if not (least(logprobs) >= -FARTHEST and most(logprobs) <= _ROUNDING):  # NaN is none
                return False
    return True


def guest(
    spec: EngineSpec,
    place: int,
    machine: JoinedMachine,
    role: str,
    deadlines: DeadlinesConfig,
    changed: Callable[[EngineHandle], None],
    proving: Proving,
    load_interval: float,
    context: ssl.SSLContext | None,
    newest: Callable[[], int],
    vocabulary: int,
) -> EngineHandle:
    """Create the handle of an engine in a place of a machine; it is not started yet.

    Args:
        place: index of the place.
        role: Python module of the engine's process.
        changed: called when the state of the engine changes.
        proving: challenges the engine after each load, to prove its weights.
        load_interval: least seconds between two loads.
        context: TLS of the connection to the machine; None: no TLS.
        newest: returns the newest published version.
        vocabulary: number of the model's token ids.
    """
    key = secrets.token_hex(32)
    process = machine.role(place, spec.name, role, {ENGINE_KEY: key})
    client = GuestEngine(spec, machine, deadlines, key, context, newest, vocabulary)
    restarts = RestartBudget(deadlines.engine_restarts, deadlines.restart_window)
    return EngineHandle(spec, process, client, deadlines, restarts, changed, proving, load_interval, machine.host)
