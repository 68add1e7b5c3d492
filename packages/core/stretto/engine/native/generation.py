"""The task that steps an engine and passes its completions to the listeners of their requests.

submit(request, listener) ─► engine ◄─ run(): step, step, step ...
                             engine ─► listener.progressed(token), listener.ended(completion)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec
from torch import Tensor

from stretto.core.canary import Challenge, Loaded, Scores
from stretto.core.deadlines import deadline
from stretto.core.engine import MOST_COMPLETIONS, EngineHealth, NewToken
from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest, WireError, several
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Partials
from stretto.engine.backend import ENDED, Stream
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.parameters import joined
from stretto.engine.native.sampling import BrokenLogits
from stretto.engine.native.validate import BrokenGrammar
from stretto.weights.mailbox import Subscriber

log = logging.getLogger(__name__)

#: Most completions that may wait for a row. One request may fill the queue.
MOST_WAITING = MOST_COMPLETIONS

#: Turns of the event loop between two steps. Queuing a request takes two or three (reading, starting its handler,
#: getting the body). Three instead of one halve the time to the first token of 16 streams, at no measurable cost.
_TURNS = 3


_IN_DOUBT = "may have the weights of no version, since its last update failed; update it again"
_GRAMMAR_SECONDS = 20.0  # most grammars compile in milliseconds, the worst in one or two seconds


# Both listeners are called between two steps, so they must be quick.
class FrameListener(Stream):
    """A stream of whole completions that listens to a `Generation`. In a run, a completion whose logits are not finite
    is an error of the engine: dropping it would bias the training distribution."""

    independent = False

    def progressed(self, new: NewToken) -> None:
        """Ignored: frames hold whole completions."""


class Feed:
    """What steps sample for the requests of one client, kept until the client takes it (`Generation.next`). `engine`:
    name for errors."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self.closed = False
        self.open: set[_FeedListener] = set()
        self.tokens: list[NewToken] = []
        self.ended: list[Completion] = []
        self.refused: list[tuple[str, RefusedRequest | EngineLost]] = []
        self.wake = asyncio.Event()

    def close(self) -> None:
        """Close the feed: `Generation.next` no longer waits for it. Its requests go on until `Generation.end`."""
        self.closed = True
        self.wake.set()


class _FeedListener:
    """Puts the completions of a request into a feed. `completions`: their number. If the logits of one are not
    finite, this request alone ends: those of a feed are independent of each other."""

    independent = True

    def __init__(self, feed: Feed, request: str, completions: int) -> None:
        self.request, self.missing = request, completions
        self._feed = feed
        feed.open.add(self)

    def progressed(self, new: NewToken) -> None:
        """Pass on a token of an unfinished completion."""
        self._feed.tokens.append(new)
        self._feed.wake.set()

    def ended(self, completion: Completion) -> None:
        """Pass on a finished completion."""
        self.missing -= 1
        self._feed.ended.append(completion)
        self._feed.wake.set()

    def refuse(self, error: RefusedRequest | EngineLost) -> None:
        """End the request with an error; ignored after its last completion, and the second time."""
        if self.missing:
            self.missing = 0
            self._feed.refused.append((self.request, error))
            self._feed.wake.set()

    def break_off(self, why: str = ENDED) -> None:
        """End the request with an EngineLost for the reason `why`; ignored after its last completion, and the second
        time."""
        self.refuse(EngineLost(self._feed.engine, why))


#: What a feed got: tokens in the order of their steps, ended completions, and requests that ended with an error.
Passed = tuple[list[NewToken], list[Completion], list[tuple[str, RefusedRequest | EngineLost]]]


class Generation:
    """Steps a native engine and passes its completions to listeners. Implements `engine.backend.Backend`.

    No method awaits while it uses the engine, so weights are loaded only between two steps.
    """

    def __init__(self, engine: NativeEngine, mailbox: Subscriber | None = None) -> None:
        """Pass requests to `engine`, which only this object may use. Nothing is generated unless `run` runs. `mailbox`:
        where `update` loads versions from; None: `update` fails, and only `load` changes the weights."""
        self.engine = engine
        self._mailbox = mailbox
        self.stopping = False  # open requests are finished, new ones refused
        self._listeners: dict[str, FrameListener | _FeedListener] = {}
        self._by_token: set[str] = set()  # requests whose listeners get each token
        self._work = asyncio.Event()
        self._scoring = asyncio.Lock()  # the KV entries of one text at a time
        self._before = Scores(())  # of the version that was left, until it is told: a load that fails tells nothing

    @property
    def open_requests(self) -> int:
        """Number of requests that were submitted and are not closed, finished ones included."""
        return len(self._listeners)

    async def prepare(self, requests: Sequence[GenerateRequest]) -> None:
        """Compile the grammars of requests, if they have any, in a thread, while the engine steps. Otherwise `submit`
        would compile them between two steps. Raises RefusedRequest if a grammar cannot be compiled, or not within 20
        seconds."""
        wanted = dict.fromkeys((request.sampling.grammar, request.sampling.stop_token_ids) for request in requests)
        for grammar, stop_token_ids in wanted:
            if grammar and self.engine.grammars is not None:
                try:
                    async with deadline(self.engine.name, "the compilation of a grammar", _GRAMMAR_SECONDS):
                        await asyncio.to_thread(self.engine.grammars.check, grammar, stop_token_ids)
                except DeadlineExceeded as late:
                    raise RefusedRequest("sampling.grammar", str(late), "a simpler one") from None

    def submit_all(self, requests: Sequence[GenerateRequest]) -> Stream:
        """Submit requests that start in the same step; the stream gets each completion when it has ended.

        Raises:
            RefusedRequest: a request is invalid; then none is accepted.
            EngineLost: the server is stopping, or too many completions wait.
        """
        stream = FrameListener(sum(len(request.seeds) for request in requests))
        with ExitStack() as submitted:
            for request in requests:
                self.submit(request, stream, every_token=False)
                submitted.callback(self.close, request.id)
            submitted.pop_all()
        return stream

    def submit_to(self, feed: Feed, requests: Sequence[GenerateRequest], *, every_token: bool) -> None:
        """Submit requests that start in the same step; `feed` gets their completions. `every_token`: it also gets each
        token in the step that samples it, unless the request continues prefixes. Raises RefusedRequest if a request is
        invalid (then none is accepted), EngineLost if the server is stopping or too many completions wait."""
        with ExitStack() as submitted:
            for request in requests:
                listener = _FeedListener(feed, request.id, len(request.seeds))
                submitted.callback(self._take_back, feed, listener)
                self.submit(request, listener, every_token=every_token)
            submitted.pop_all()

    async def next(self, feed: Feed) -> Passed:
        """Wait until a feed has tokens, ended completions or refused requests, and return all since the last call; once
        the feed is closed without waiting. It has no timeout."""
        if not (feed.tokens or feed.ended or feed.refused or feed.closed):
            feed.wake.clear()
            await feed.wake.wait()
        passed: Passed = feed.tokens, feed.ended, feed.refused
        feed.tokens, feed.ended, feed.refused = [], [], []
        over = {completion.request for completion in passed[1]} | {request for request, _ in passed[2]}
        if over:
            for listener in [listener for listener in feed.open if not listener.missing]:
                self._finish(feed, listener)
        return passed

    def end(self, feed: Feed) -> None:
        """Abort all requests of a feed."""
        for listener in [*feed.open]:
            self._finish(feed, listener)

    def _take_back(self, feed: Feed, listener: _FeedListener) -> None:
        listener.missing = 0  # the caller gets the error, and the feed does not
        self._finish(feed, listener)

    def _finish(self, feed: Feed, listener: _FeedListener) -> None:
        feed.open.discard(listener)
        if self._listeners.get(listener.request) is listener:
            self.close(listener.request)

    def submit(self, request: GenerateRequest, listener: FrameListener | _FeedListener, *, every_token: bool) -> None:
        """Submit a request; `listener` gets its completions until `close` is called. `every_token`: it also gets each
        token in the step that samples it, unless the request continues prefixes.

        Raises:
            RefusedRequest: the request is invalid, or its id is in use.
            EngineLost: the server is stopping, too many completions wait, or the weights are in doubt and there is no
                mailbox.
        """
        if self.stopping:
            raise EngineLost(self.engine.name, "is stopping")
        if self._mailbox is None:  # nobody but the caller would load other weights
            self._check_proven()
        if request.id in self._listeners:  # finished by the engine, not yet sent
            raise RefusedRequest("id", repr(request.id), "an id that no open request uses")
        if self.engine.waiting and self.engine.waiting + len(request.seeds) > MOST_WAITING:
            how = f"has {several(self.engine.waiting, 'completion')} waiting already, of {MOST_WAITING:,} that may"
            raise EngineLost(self.engine.name, how)
        self.engine.add(request)
        self._work.set()
        self._listeners[request.id] = listener
        if every_token and not request.prefixes:  # a continued completion is passed on when it has ended
            self._by_token.add(request.id)

    def close(self, request: str) -> None:
        """End the request with this id. If it has unfinished completions, they are aborted, and its listener is broken
        off. May be called twice."""
        listener = self._listeners.pop(request, None)
        self._by_token.discard(request)
        if listener is not None and listener.missing:
            listener.break_off()
        if listener is not None and self.engine.is_open(request):  # a refused stream misses nothing more
            self.engine.abort(request)

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """New tokens of unfinished completions, by request id and member; completions without any are left out.
        `known`: by request id, the number of tokens of each member that the caller already has; other requests are
        left out."""
        found: Partials = {}
        for progress in self.engine.progress(known):
            found.setdefault(progress.request, {})[progress.member] = progress.segment
        return found

    async def update(self, version: int, challenge: Challenge | None = None) -> Loaded:
        """Load a published version, unless it is loaded and proven, and answer the challenge (a text to score, which
        proves the weights; None: none) before the next step; returns the version in use and the answer. After an answer
        outside the tolerance, or if answering fails, no step runs until a version is loaded.

        Raises:
            WireError: the version is not available, damaged or not of this model, or there is no mailbox; the engine
                keeps its version.
            RefusedRequest: the version is older than the version in use.
        """
        if self._mailbox is None:
            raise WireError(f"version {version} cannot be loaded: {self.engine.name} serves the weights of its folder")
        start, tensors = time.monotonic(), None
        if version != self.engine.version or not self.engine.updates or self.engine.in_doubt:
            # Reading and checking touch nothing of the engine, so steps go on meanwhile: the pause is the copy alone.
            tensors = await asyncio.to_thread(self._mailbox.load, version)
        if challenge is not None and not self.engine.in_doubt:
            self._before = self.engine.look_back(challenge.sampled if tensors is not None else 0)
        if tensors is not None:
            self.engine.update(version, tensors, since=start)
        scores = None
        if challenge is not None:
            self.engine.in_doubt = True  # also if the answer fails
            scores = self.engine.prove(challenge.canary, keeps=challenge.keeps).behind(self._before)
            self._before = Scores(())
            self.engine.in_doubt = not challenge.is_answered(scores)
        self._work.set()
        return Loaded(self.engine.version, scores)

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Load weights that the caller has, without a mailbox, as `version`. `tensors`: all parameters by name, or
        adapters (`engine.native.parameters`). Raises TornPublication if they do not fit the model, RefusedRequest if
        `version` is older than the version in use. Any other error leaves the weights in doubt, and breaks off all open
        requests."""
        try:
            self.engine.update(version, tensors)
        finally:
            if self.engine.in_doubt:
                for listener in self._listeners.values():
                    listener.break_off(_IN_DOUBT)

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Log-probabilities of all tokens but the first of each text (token ids), by the version in use, at temperature
        1. They are computed in pieces between steps (`NativeEngine.score`), the texts of one call at a time. If a
        version is loaded meanwhile, all are computed again, in one go. Raises RefusedRequest if a text is empty, longer
        than the context, or has tokens outside the vocabulary; EngineLost if the weights are in doubt."""
        async with self._scoring:
            self._check_proven()
            engine, found = self.engine, list[tuple[int, tuple[float, ...]]]()
            updates = engine.updates
            for piece in engine.score(texts):
                self._check_proven()
                if updates != engine.updates:
                    return joined(engine.score(texts), len(texts))
                found.append(piece)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)  # the next step
            return joined(found, len(texts))

    def _check_proven(self) -> None:
        if self.engine.in_doubt:
            raise EngineLost(self.engine.name, _IN_DOUBT)

    async def health(self) -> EngineHealth:
        """Version, queue length, counters, and the bytes of published versions that were read."""
        checked = 0 if self._mailbox is None else self._mailbox.checked
        return msgspec.structs.replace(self.engine.health(), checked=checked)

    def drain_spans(self) -> list[Span]:
        """Times at which the engine was busy, since the last call; each span is returned once."""
        return self.engine.drain_spans()

    async def run(self) -> None:
        """Step the engine until cancelled; wait while it is idle or its weights are in doubt. Whenever it becomes idle,
        its integrity is checked. Errors of the engine are raised, but not those that end single requests alone (a
        broken grammar, broken logits of independent clients). In any case the end breaks off all requests."""
        try:
            while True:
                if self.engine.idle or self.engine.in_doubt:
                    if self.engine.idle:
                        self.engine.check_integrity()  # an idle engine holds nothing
                    self._work.clear()
                    await self._work.wait()  # no deadline: being idle is no failure
                    continue
                for completion in self._step():
                    self._listeners[completion.request].ended(completion)
                if self._by_token:
                    self._pass_tokens()
                for _ in range(_TURNS):
                    await asyncio.sleep(0)  # requests are read, completions sent, weights loaded
        finally:
            self.break_off()

    def break_off(self) -> None:
        """Break off the listener of every request, and refuse new requests."""
        self.stopping = True
        for listener in self._listeners.values():
            listener.break_off()

    def _step(self) -> list[Completion]:
        """Step the engine; returns the completions that ended. A request whose grammar cannot be followed is refused
        and aborted instead, and the others wait for the next step; so is one of an independent client whose logits are
        not finite.

        Raises:
            BrokenLogits: those of another request are not finite.
        """
        try:
            return self.engine.step()
        except BrokenGrammar as broken:
            self._listeners[broken.request].refuse(broken.refused)
            self.engine.abort(broken.request)
        except BrokenLogits as broken:
            if not all(self._listeners[request].independent for request in broken.requests):
                raise
            for request in broken.requests:
                log.warning("%s aborts request %s: %s", self.engine.name, request, broken)
                self._listeners[request].break_off(f"cannot go on: {broken}")
            self.engine.give_up(broken.requests)
        return []

    def _pass_tokens(self) -> None:
        for new in self.engine.new_tokens(self._by_token):
            self._listeners[new.request].progressed(new)
