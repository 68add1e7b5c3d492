"""Adapter that serves the engine's interface with a vLLM or SGLang server.

    request ─► one request to the server per completion ─► tokens, log-probabilities, versions ─► Stream

    update, recompute   pause: running requests end   load   resume: each is sent again, with its tokens as prompt
    update, keep        pause: running requests stay  load   resume: they continue; the server tells token versions

With "recompute", all tokens of one request to the server have the version that this adapter has loaded. So versions do
not depend on the server's word; if it reports versions, they must be equal.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

from stretto.core.canary import Challenge, Loaded, Scores
from stretto.core.deadlines import waiting
from stretto.core.engine import EngineHealth, is_evaluation
from stretto.core.errors import DeadlineExceeded, EngineLied, EngineLost, RefusedRequest, RoleFailed, WireError
from stretto.core.events import BusySpans, Span
from stretto.core.records import GenerateRequest, Partials, StopReason
from stretto.core.tasks import cancel_and_wait
from stretto.engine.backend import ENDED, Stream
from stretto.engine.native.validate import check_prefixes, check_request, check_text
from stretto.engine.text import StopTexts
from stretto_servers.completions import OpenCompletion
from stretto_servers.make import NOT_RAW_OR_PLAIN, RAW, Limits, Make, Occupancy, canary_scores, is_shaped, reports_raw
from stretto_servers.staging import FolderAsItIs, changed, compare, shapes_of

_LOOK_SECONDS = 0.001
_AGAIN_TOKENS = 4096  # most tokens per update whose log-probabilities are recomputed for the canary
_DRAIN_SECONDS = 5.0  # in which requests end after a pause
_NOTHING: tuple[int, dict[str, tuple[int, ...]], Sequence[Mapping[str, str]]] = -1, {}, ()  # no version is proven
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


@dataclass
class _Counts:
    generated: int = 0
    prefilled: int = 0
    recomputed: int = 0
    interrupted: int = 0
    wasted: int = 0
    updates: int = 0
    busy_seconds: float = 0.0


class ExternalEngine:
    """Backend that samples with an inference server of another make (satisfies `engine.backend.Backend`). It must be
    made in a running event loop.

    Args:
        name: the engine's name in errors and spans.
        make: client of the server.
        weights: gives published versions as folders.
        stop_texts: finds stop texts in sampled tokens.
        on_update: "recompute" or "keep" the KV cache in an update (see the module).
    """

    def __init__(
        self,
        name: str,
        make: Make,
        limits: Limits,
        weights: FolderAsItIs,
        stop_texts: StopTexts,
        on_update: Literal["recompute", "keep"],
    ) -> None:
        self.name = name
        self.version = 0
        self._make, self._limits, self._weights, self._stop_texts = make, limits, weights, stop_texts
        self._keep = self._kept = on_update == "keep"  # the second: in the last load
        self._open: dict[str, list[OpenCompletion]] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._changing = asyncio.Lock()  # one update at a time
        self._sampling = asyncio.Event()  # cleared while weights are loaded
        self._sampling.set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A random start, because servers remember request names for seconds, and an earlier adapter's must differ.
        self._attempts = itertools.count(secrets.randbits(48))
        self._counts = _Counts()
        self._spans = BusySpans(name)
        self._busy_since: float | None = None
        self._streams = 0  # requests in progress on the server
        self._room = asyncio.Semaphore(limits.connections)
        self._loads = 0  # number of loads that have begun
        self._folder = Path()  # folder of the last load
        self._raw: asyncio.Task[bool] | None = None  # asks whether the server `reports_raw`
        self._in_doubt = False  # the last canary has not proven that the server has the weights of its version
        self._proven = _NOTHING  # version proven last, the shapes of its tensors, and what the workers held then
        self._before = Scores(())  # of the version that was left, until it is told: a load that fails tells nothing

    # ── requests ─────────────────────────────────────────────────────────────────────────────────

    async def prepare(self, requests: Sequence[GenerateRequest]) -> None:
        """Check that no request has a grammar, which servers of other makes do not get. Before the first request with a
        temperature or filters, ask the server whether its log-probabilities follow them; evaluations need none. Raises
        RefusedRequest if a request has a grammar, or they do not, and EngineLost if the server does not answer."""
        if any(request.sampling.grammar for request in requests):
            raise RefusedRequest("sampling.grammar", "a grammar", f"none: {self.name} is not the embedded engine")
        if not any(is_shaped(one.sampling) for one in requests if not is_evaluation(one.id)):
            return
        if self._raw is None or (self._raw.done() and self._raw.exception() is not None):
            self._raw = asyncio.create_task(self._reports_raw())
        if await asyncio.shield(self._raw):  # requests that come meanwhile share the answer
            raise RefusedRequest("sampling", f"a temperature or filters, and {self.name} {RAW}", NOT_RAW_OR_PLAIN)

    async def _reports_raw(self) -> bool:
        while True:
            await self._sampling.wait()  # an update has a deadline of its own
            loads = self._loads
            try:
                raw = await reports_raw(self._make, self._limits.vocab_size, self._limits.context_length)
                if loads == self._loads:  # else an update came between
                    return raw
            except (WireError, EngineLost, DeadlineExceeded) as error:
                if loads == self._loads:
                    raise EngineLost(self.name, f"does not say what its log-probabilities follow: {error}") from error

    def submit_all(self, requests: Sequence[GenerateRequest]) -> Stream:
        """Start a task for each completion of the requests; returns the stream of their results. Raises RefusedRequest
        if a request is invalid, or its id is in use (none is started), and EngineLost if the engine has failed."""
        self._check_working()
        taken = set(self._open)
        vocab_size, context = self._limits.vocab_size, self._limits.context_length
        for request in requests:
            check_request(request, vocab_size, context)
            check_prefixes(request, vocab_size, context, self.version)
            if request.sampling.stop:
                self._stop_texts.check_served()
            if request.id in taken:
                raise RefusedRequest("id", repr(request.id), "an id that no open request uses")
            taken.add(request.id)
        stream = Stream(sum(len(request.seeds) for request in requests))
        for request in requests:
            limit = min(request.sampling.max_tokens, context - len(request.prompt_token_ids))
            stops = request.sampling.stop
            opened = [
                OpenCompletion(request, member, stream, limit, self._stop_texts.watch(stops) if stops else None)
                for member in range(len(request.seeds))
            ]
            self._open[request.id] = opened
            self._tasks[request.id] = [asyncio.create_task(self._complete(completion)) for completion in opened]
            for task in self._tasks[request.id]:
                task.add_done_callback(self._notice)
            self._counts.prefilled += len(request.prompt_token_ids)
        return stream

    def close(self, request: str) -> None:
        """End the request with this id: unfinished completions are aborted on the server, by closing their connections,
        and if there is one, all tokens of the request count as wasted. Does nothing for an unknown id."""
        opened = self._open.pop(request, [])
        if not all(completion.done for completion in opened):  # without one completion the whole group is wasted
            self._counts.wasted += sum(len(completion.token_ids) for completion in opened)
        for task in self._tasks.pop(request, []):
            task.cancel()

    async def _complete(self, completion: OpenCompletion) -> None:
        """Generate one completion, with as many requests to the server as updates require, and end its stream in every
        case. If the server breaks off or is late, so does the stream, and the conductor continues the completion
        elsewhere. A mistake in the request refuses it. Tokens that cannot be trusted end it with EngineLied, and fail
        the whole engine."""
        try:
            ended = completion.whole  # already, if the engine before was lost between its last token and its end
            while ended not in _REASONS:
                while not self._sampling.is_set():  # the next update may begin before this task runs
                    await self._sampling.wait()  # an update has a deadline of its own
                async with self._room:
                    if not self._sampling.is_set():
                        continue
                    ended = await self._stream(completion)
                if len(completion.had) > 1:  # what a version sampled that is not proven is not told
                    completion.doubt(self.version + (not self._in_doubt))
                if ended not in (*_REASONS, "abort"):
                    raise EngineLost(self.name, f"ended {completion.request.id} with the reason {ended!r}")
                if ended == "abort":
                    self._counts.interrupted += completion.interrupt()
                    self._counts.recomputed += len(completion.token_ids)
            if completion.uncertain:
                await self._sampling.wait()  # for the proof
                completion.uncertain = 0
            completion.end(_REASONS[ended])
        except (EngineLost, DeadlineExceeded):  # another engine continues it; the tokens of a late server are trusted
            completion.stream.break_off()
        except RefusedRequest as refused:  # a mistake in the request; the engine goes on
            completion.stream.refuse(refused)
        except WireError as error:  # the server's tokens cannot be trusted any more
            completion.distrust()
            completion.stream.refuse(EngineLied(self.name, f"is not trusted: {error}"))
            self._fail(error)

    def _notice(self, task: asyncio.Task[None]) -> None:
        """Make `run` raise an unexpected error of a task, which is a bug."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _stream(self, completion: OpenCompletion) -> str:
        """Send one request to the server and read its tokens; returns why they ended: "stop", "length", "abort" if an
        update ended the request, or another reason of the server, unchecked. Raises EngineLost if the server aborted it
        without an update, or ended its stream without a reason, RefusedRequest if it refuses the request, and
        WireError if tokens, versions or reason contradict it (`take`, `stamp` and `check_end` of `OpenCompletion`)."""
        asked, loads = completion.continuation(next(self._attempts), self.version), self._loads
        ended, stopped = "", False
        spans: tuple[tuple[str, int, int], ...] = ()
        self._enter()
        completion.asked = True
        try:
            async with contextlib.aclosing(self._make.stream(asked)) as deltas:
                async for delta in deltas:
                    if loads != self._loads and not completion.told and not self._kept:
                        return "abort"  # the version of its first token is unknown
                    spans, ended = delta.spans or spans, delta.ended
                    if not stopped:
                        before = completion.told
                        stopped = completion.take(delta, self.version, self._limits.vocab_size)
                        self._counts.generated += completion.told - before
                    if ended or (stopped and not completion.uncertain):  # uncertain versions come with the end only
                        break
        finally:
            completion.asked = False
            self._leave()
        if ended == "abort":
            ended = completion.whole or ended
        if ended == "abort" and loads == self._loads and not stopped:
            raise EngineLost(self.name, f"gave up {completion.request.id}")
        if not ended and (not stopped or completion.uncertain):
            raise EngineLost(self.name, ENDED)
        completion.stamp(spans, loaded=self._loads > 0)
        if stopped:
            return "stop"
        completion.check_end(ended)
        return ended

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """New tokens of completions up to the first of uncertain version, by request and member, where there are any.
        `known`: number of tokens of each member that the caller already has, by request."""
        found: Partials = {}
        for request, counts in known.items():
            for completion in self._open.get(request, ()):
                if completion.member < len(counts):
                    segment = completion.segment(counts[completion.member])
                    if segment.length:
                        found.setdefault(request, {})[completion.member] = segment
        return found

    # ── versions ─────────────────────────────────────────────────────────────────────────────────

    async def update(self, version: int, challenge: Challenge | None = None) -> Loaded:
        """Verify a published version, pause the server, load it, resume, and run the canary `challenge` (None: none)
        before any token of the version is passed on. One that is already loaded is not loaded again, unless its last
        scores were wrong. Returns the version in use and the scores of the challenge; if they are wrong, sampling stays
        stopped until a later update.

        Raises:
            RefusedRequest: the version is older than the one in use.
            TornPublication, WireError: the version is damaged or not available; the engine keeps the one in use.
            RoleFailed: the server refuses the load or the challenge; sampling stays stopped until a later update.
            EngineLost: the load failed otherwise, and the engine is unusable.
        """
        with waiting(self.name, "the update before", 0.0):
            await self._changing.acquire()
        try:
            self._check_working()
            if version < self.version:
                raise RefusedRequest("version", str(version), f"at least {self.version}, the version in use")
            folder = None
            if version > self.version or not self._counts.updates or self._in_doubt:
                if not self._in_doubt:
                    self._before = await self._look_back(0 if challenge is None else challenge.sampled)
                start = time.monotonic()
                folder = await asyncio.to_thread(self._weights.folder_of, version)  # the new weights, not the old
                size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
                self._spans.add("map", start, time.monotonic(), version, size)
            try:
                scores = await (self._load(folder, version, challenge) if folder else self._answer(challenge))
            except WireError as error:  # the server's word, and it goes on
                self._in_doubt = True
                self._take_back()
                raise RoleFailed(self.name, str(error), 1) from error
            told, self._before = scores and scores.behind(self._before), Scores(())
            return Loaded(self.version, told)
        finally:
            self._changing.release()

    async def _sampled_again(self, wanted: int) -> tuple[tuple[float, float], ...]:
        """Recompute log-probabilities of sampled tokens before an update. Returns pairs (as sampled, as recomputed) for
        about `wanted` tokens of open completions; fewer if there are no more, or the server does not score them now.
        None with a temperature or filters, without which it scores, nor with "keep", for older KV entries."""
        if self._keep or not wanted:
            return ()
        start, pairs, most = time.monotonic(), list[tuple[float, float]](), _AGAIN_TOKENS
        texts = [one.plainly_sampled() for one in itertools.chain.from_iterable(self._open.values())]
        for text, told in sorted(texts, key=lambda one: len(one[0])):
            if len(pairs) >= wanted or len(text) > min(most, self._limits.context_length - 1):
                break
            if told:
                try:
                    pairs += zip(told, (await self._make.score(text))[-len(told) :], strict=True)
                except (WireError, EngineLost, DeadlineExceeded):  # no evidence: the load and its canary decide
                    break
                most -= len(text)
        self._spans.add("prove", start, time.monotonic(), self.version)
        return tuple(pairs)

    async def _look_back(self, wanted: int) -> Scores:
        """Scores without a text: tensors in memory that have changed since the proof, and `_sampled_again`."""
        version, shapes, before = self._proven
        try:
            now = await self._make.held(self._folder, shapes) if before else ()
        except (WireError, EngineLost, DeadlineExceeded):  # no evidence: the load and its canary decide
            now = ()
        left, lost = (version, changed(before, now)) if now else (-1, ())
        return Scores((), sampled=await self._sampled_again(wanted), left=left, changed=lost)

    async def _answer(self, challenge: Challenge | None) -> Scores | None:
        """Run a canary challenge (None: do nothing) on the server; return its scores. Call it while no completion runs.
        Sampling stops, and continues only if the scores prove that the server has the weights of its version."""
        if challenge is None:
            return None
        self._sampling.clear()
        self._in_doubt = True  # also if the server fails to answer: then the next update loads again
        start = time.monotonic()
        canary, name = challenge.canary, f"canary-{self.version}-{next(self._attempts)}"
        context = self._limits.context_length
        scores = await canary_scores(self._make, canary.token_ids, name, self.version, context, keep=challenge.keeps)
        if canary.digests:
            shapes = await asyncio.to_thread(shapes_of, self._folder)
            workers = await self._make.held(self._folder, shapes)
            self._proven = self.version, shapes, workers
            differing, compared = await asyncio.to_thread(compare, self._folder, canary.digests, workers)
            scores = msgspec.structs.replace(scores, differing=differing, compared=compared)
        self._spans.add("prove", start, time.monotonic(), self.version)
        self._in_doubt = not challenge.is_answered(scores)
        if self._in_doubt:
            self._take_back()
        else:
            self._sampling.set()
        return scores

    def _take_back(self) -> None:
        """End the requests that have run while the version in doubt was loaded, and drop what it has sampled; they are
        asked again once a version is proven."""
        for request, opened in self._open.items():
            tasks = self._tasks[request]
            for member, completion in enumerate(opened):
                if len(completion.had) > 1 and not tasks[member].done():
                    tasks[member].cancel()
                    stops = completion.request.sampling.stop
                    self._counts.wasted += completion.take_back(self._stop_texts.watch(stops) if stops else None)
                    tasks[member] = asyncio.create_task(self._complete(completion))
                    tasks[member].add_done_callback(self._notice)

    async def _load(self, folder: Path, version: int, challenge: Challenge | None) -> Scores | None:
        start = time.monotonic()
        self._sampling.clear()
        self._loads, self._folder, self._proven = self._loads + 1, folder, _NOTHING
        self._kept = keep = self._keep and not self._in_doubt  # the cache has entries of a refused version
        try:
            await self._make.pause(keep=keep)
            if keep:
                self._mark_running(version)
            else:
                await self._drain()
            await self._make.load(folder, version, keep=keep)
            self.version, self._in_doubt = version, challenge is not None
            await self._make.resume()
            scores = await self._answer(challenge)
        except WireError:
            raise
        except BaseException as error:  # also if cancelled, it is unknown which weights the server has
            self._fail(error if isinstance(error, Exception) else EngineLost(self.name, "was stopped while loading"))
            if isinstance(error, (EngineLost, DeadlineExceeded)):  # the run continues with another engine
                raise EngineLost(self.name, f"failed to load version {version}: {error}") from error
            raise
        self._counts.updates += 1
        self._spans.add("load", start, time.monotonic(), version)
        if scores is None:
            self._sampling.set()
        return scores

    def _mark_running(self, version: int) -> None:
        """Note that the server will have this `version` for each running request too, whose tokens' versions it reports
        at the end. Requests that have tokens count as interrupted."""
        for completion in itertools.chain.from_iterable(self._open.values()):
            if completion.asked:
                completion.had.append(version)
                self._counts.interrupted += completion.interrupt()

    async def _drain(self) -> None:
        """Wait until the requests that the pause has ended have delivered their last tokens; EngineLost after 5 s."""
        end = time.monotonic() + _DRAIN_SECONDS
        while any(open.asked and open.told for open in itertools.chain.from_iterable(self._open.values())):
            if time.monotonic() > end:
                raise EngineLost(self.name, "is paused and does not end its requests")
            await asyncio.sleep(_LOOK_SECONDS)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Wait until the engine fails, and raise its error. At its end all is broken off and closed."""
        try:
            await asyncio.shield(self._failure)
        finally:
            for request in list(self._open):
                for completion in self._open[request]:
                    completion.stream.break_off()
            probes = [self._raw] if self._raw is not None else []
            await cancel_and_wait([*probes, *itertools.chain.from_iterable(self._tasks.values())])
            await self._make.close()

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Score texts (token ids) on the server: log-probabilities of all tokens but the first of each. Raises
        RefusedRequest for an invalid text, EngineLost if the engine has failed, and the errors of `Make.score`."""
        self._check_working()
        for number, text in enumerate(texts):
            check_text(text, f"texts[{number}]", self._limits.vocab_size, self._limits.context_length - 1)
        return [await self._make.score(text) if len(text) > 1 else () for text in texts]

    async def health(self) -> EngineHealth:
        """Version of the weights, numbers of completions (those that wait in the server run), and counters. `needed`:
        share of the recipe's slots in use, or of the server's KV cache if larger. EngineLost if the engine failed."""
        self._check_working()
        opened = [opened for opened in self._open.values() if not all(completion.done for completion in opened)]
        unfinished = sum(len(completion.token_ids) for completion in itertools.chain.from_iterable(opened))
        running = sum(not completion.done for completion in itertools.chain.from_iterable(opened))
        told = Occupancy(0, 0, 0.0)
        with contextlib.suppress(WireError, EngineLost, DeadlineExceeded):  # a failed measurement must not end a run
            told = await self._make.occupancy()
        self._note_busy()
        return EngineHealth(
            version=self.version,
            running=running,
            waiting=0,
            preempted=told.preempted,
            unfinished=unfinished,
            needed=max(running / self._limits.slots, told.needed),
            checked=self._weights.checked + self._make.read,
            **asdict(self._counts),
        )

    def drain_spans(self) -> list[Span]:
        """Return the spans of generation and loads since the last call, for the timeline, and forget them."""
        self._note_busy()
        return self._spans.drain()

    def _check_working(self) -> None:
        if self._failure.done():
            raise EngineLost(self.name, "is stopping")

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _enter(self) -> None:
        self._streams += 1
        if self._busy_since is None:
            self._busy_since = time.monotonic()

    def _leave(self) -> None:
        self._streams -= 1
        if not self._streams:
            self._note_busy()
            self._busy_since = None

    def _note_busy(self) -> None:
        if self._busy_since is not None:
            now = time.monotonic()
            self._spans.add("generate", self._busy_since, now, self.version)
            self._counts.busy_seconds += now - self._busy_since
            self._busy_since = now
