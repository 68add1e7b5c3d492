"""The task that steps an engine and passes its completions to the listeners of their requests.

submit(request, listener) ─► engine ◄─ run(): step, step, step ...
                             engine ─► listener.progressed(tokens), listener.ended(completion)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
from torch import Tensor

from stretto.core.canary import Challenge, Loaded
from stretto.core.deadlines import deadline
from stretto.core.engine import MOST_COMPLETIONS, EngineHealth, NewToken, Progress
from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest, WireError
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


#: Consumes a new token; returns False to get the token from the iterator later instead.
Take = Callable[[NewToken], bool]

_GRAMMAR_SECONDS = 20.0  # most grammars compile in milliseconds, the worst in one or two seconds


# Both listeners are called between two steps, so they must be quick.
class FrameListener(Stream):
    """The frames of one HTTP response, as a listener of a `Generation`; gets whole completions only."""

    def progressed(self, new: NewToken) -> None:
        """Ignored: frames hold whole completions."""


class TokenStream:
    """The tokens of requests submitted together, as they are sampled.

    Each token is offered to `take` (None: nobody) in the step that samples it. Iterating yields the tokens that `take`
    has not consumed, and the end of each completion. So a step with many streams need not wake a task for each of them.
    `engine`: name for errors; `completions`: how many the requests have in all.
    """

    def __init__(self, engine: str, completions: int, take: Take | None = None) -> None:
        self.missing = completions
        self._engine, self._take = engine, take
        self._new: list[Progress] = []
        self._known = Counter[tuple[str, int]]()  # tokens of each completion so far
        self._error: RefusedRequest | EngineLost | None = None
        self._fault: Exception | None = None  # of `take`
        self._wake = asyncio.Event()

    def progressed(self, new: NewToken) -> None:
        """Offer the next token of an unfinished completion to `take`. Queue it for the iterator if `take` does not
        consume it or fails, or if earlier tokens are queued."""
        self._known[new.request, new.member] += 1
        try:
            if self._take is not None and not self._new and self._take(new):
                return
        except Exception as error:  # a fault of one client's stream must not end the others'; its iterator raises it
            self._fault = self._fault or error
        self._pass_on(new.progress())

    def ended(self, completion: Completion) -> None:
        """Queue the end of a finished completion for the iterator: its tokens that `progressed` has not had, with the
        stop reason."""
        self.missing -= 1
        known = self._known[completion.request, completion.member]
        rest, likeliest = completion.segment.after(known), completion.top_logprobs[known:]
        self._pass_on(Progress(completion.request, completion.member, rest, likeliest))

    def _pass_on(self, progress: Progress) -> None:
        self._new.append(progress)
        self._wake.set()

    def refuse(self, error: RefusedRequest | EngineLost) -> None:
        """End the stream: the iterator raises `error` instead of further tokens, queued ones included. A second error,
        or one after the last completion has ended, is ignored."""
        self._error = self._error or error
        self._wake.set()

    def break_off(self, why: str = ENDED) -> None:
        """End the stream: the iterator raises EngineLost with the reason `why`, unless all completions have ended."""
        self.refuse(EngineLost(self._engine, why))

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[Progress]:
        """Wait for tokens; returns all since the last call, one `Progress` per completion and step. It has no timeout.

        Raises:
            StopAsyncIteration: all completions have ended and were returned.
            RefusedRequest: the request was refused after it was submitted.
            EngineLost: the stream was ended early.
            Exception: an error raised by the consumer `take`.
        """
        while True:
            if (error := self._fault or (self._error if self.missing else None)) is not None:
                raise error
            if self._new:
                new, self._new = self._new, []
                return new
            if not self.missing:
                raise StopAsyncIteration
            await self._wake.wait()
            self._wake.clear()


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
        self._listeners: dict[str, FrameListener | TokenStream] = {}
        self._by_token: set[str] = set()  # requests whose listeners get each token
        self._work = asyncio.Event()
        self._scoring = asyncio.Lock()  # the KV entries of one text at a time

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

    @contextmanager
    def streaming(self, requests: Sequence[GenerateRequest], take: Take | None = None) -> Iterator[TokenStream]:
        """Context manager: submit requests, and close them at the end of the block. Without `take` the stream yields
        completions as they end; with `take` it has every token when it is sampled (`TokenStream`).

        Raises:
            RefusedRequest: a request is invalid; then none is accepted.
            EngineLost: the server is stopping, or too many completions wait.
        """
        stream = TokenStream(self.engine.name, sum(len(request.seeds) for request in requests), take)
        with ExitStack() as submitted:  # without a request that is refused because another caller has its id
            for request in requests:
                self.submit(request, stream, every_token=take is not None)
                submitted.callback(self.close, request.id)
            yield stream

    def submit(self, request: GenerateRequest, listener: FrameListener | TokenStream, *, every_token: bool) -> None:
        """Submit a request; `listener` gets its completions until `close` is called. `every_token`: the listener also
        gets each token in the step that samples it, unless the request continues prefixes.

        Raises:
            RefusedRequest: the request is invalid, or its id is in use.
            EngineLost: the server is stopping, or too many completions wait.
        """
        if self.stopping:
            raise EngineLost(self.engine.name, "is stopping")
        if request.id in self._listeners:  # finished by the engine, not yet sent
            raise RefusedRequest("id", repr(request.id), "an id that no open request uses")
        if self.engine.waiting and self.engine.waiting + len(request.seeds) > MOST_WAITING:
            how = f"has {self.engine.waiting:,} completions waiting already, of {MOST_WAITING:,} that may"
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
        sampled: tuple[tuple[float, float], ...] = ()
        if version != self.engine.version or not self.engine.updates or self.engine.in_doubt:
            # Reading and checking touch nothing of the engine, so steps go on meanwhile: the pause is the copy alone.
            start = time.monotonic()
            tensors = await asyncio.to_thread(self._mailbox.load, version)
            if challenge is not None and not self.engine.in_doubt:
                sampled = self.engine.sampled_again(challenge.sampled)
            self.engine.update(version, tensors, since=start)
        scores = None
        if challenge is not None:
            self.engine.in_doubt = True  # also if the answer fails
            scores = msgspec.structs.replace(self.engine.prove(challenge.canary), sampled=sampled)
            self.engine.in_doubt = not challenge.is_answered(scores)
        self._work.set()
        return Loaded(self.engine.version, scores)

    def load(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Load weights that the caller has, without a mailbox, as `version`. `tensors`: as for `NativeEngine.update`.
        Raises TornPublication if they do not fit the model, RefusedRequest if `version` is older than the version in
        use."""
        self.engine.update(version, tensors)
        self._work.set()  # an earlier load may have failed halfway

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Log-probabilities of all tokens but the first of each text (token ids), by the version in use, at temperature
        1. They are computed in pieces between steps (`NativeEngine.score`), the texts of one call at a time. If a
        version is loaded meanwhile, all are computed again, in one go. Raises RefusedRequest if a text is empty, longer
        than the context, or has tokens outside the vocabulary."""
        async with self._scoring:
            engine, found = self.engine, list[tuple[int, tuple[float, ...]]]()
            weights = engine.updates, engine.in_doubt
            for piece in engine.score(texts):
                if weights != (engine.updates, engine.in_doubt):
                    return joined(engine.score(texts), len(texts))
                found.append(piece)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)  # the next step
            return joined(found, len(texts))

    async def health(self) -> EngineHealth:
        """Version, queue length, counters, and the bytes of published versions that were read."""
        checked = 0 if self._mailbox is None else self._mailbox.checked
        return msgspec.structs.replace(self.engine.health(), checked=checked)

    def drain_spans(self) -> list[Span]:
        """Times at which the engine was busy, since the last call; each span is returned once."""
        return self.engine.drain_spans()

    async def run(self) -> None:
        """Step the engine until cancelled; wait while it is idle or its weights are in doubt. Whenever it becomes idle,
        its integrity is checked. An error of the engine, such as BrokenLogits or BoundViolated, is raised. In any case
        the end breaks off all requests (`break_off`)."""
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
        and aborted instead, and the others wait for the next step."""
        try:
            return self.engine.step()
        except BrokenGrammar as broken:
            self._listeners[broken.request].refuse(broken.refused)
            self.engine.abort(broken.request)
            return []

    def _pass_tokens(self) -> None:
        for new in self.engine.new_tokens(self._by_token):
            self._listeners[new.request].progressed(new)


class SharedGeneration(Generation):
    """Generation for independent clients: a request with non-finite logits is aborted, and the others continue.

    In a run, non-finite logits are an error that `Generation` raises: dropping such completions would bias the training
    distribution.
    """

    def _step(self) -> list[Completion]:
        try:
            return super()._step()
        except BrokenLogits as broken:
            for request in broken.requests:
                log.warning("%s aborts request %s: %s", self.engine.name, request, broken)
                self._listeners[request].break_off(f"cannot go on: {broken}")
            self.engine.give_up(broken.requests)
            return []
