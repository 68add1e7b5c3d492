"""The engine interface used by the loop, and the limits of a request.

The HTTP client of the native engine (`engine.http.client`) satisfies it; clients of other engines can.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stretto.core.canary import Ask, Loaded
from stretto.core.errors import RefusedRequest
from stretto.core.events import Span
from stretto.core.frames import Count, Moment, Whole
from stretto.core.records import Completion, GenerateRequest, Likeliest, Partials, Record, Segment

EVALUATION = "evaluation."  #: begins the ids of an evaluation's requests
MOST_STOPS = 64  #: most stop texts of a request
#: Most stop tokens of a request; engines reserve room in every row for the largest number seen.
MOST_STOP_TOKENS = 256
MOST_COMPLETIONS = 65_536  #: most completions of a request
MOST_INTERRUPTIONS = 2**31 - 1  #: most interruptions of a completion
COLDEST = 1e-3  #: lowest temperature above 0; below it logits / temperature leaves the range of float32
LONGEST_STOP = 256  #: most characters of a stop text
MOST_LIKELIEST = 20  #: most top log-probabilities of each token of a completion
MOST_GRAMMAR = 32_768  #: most characters of a grammar; compiling a longer grammar could stall an engine for seconds

#: Options of llguidance: JSON with one spelling per value, so that a model cannot emit spaces for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def is_evaluation(request: str) -> bool:
    """Whether the request with this id belongs to an evaluation, of which log-probabilities are not used."""
    return request.startswith(EVALUATION)


class EngineHealth(Record, frozen=True):
    """State of an engine. Counters start at 0 with its process: of tokens `generated`, `prefilled`, `recomputed` and
    `wasted` (of aborted requests), of completions `interrupted` and `preempted`, of bytes `checked` (read of versions).
    As of now: `unfinished` (tokens of open requests), `resident` (bytes), `needed` (demand by supply; above 1: waits).

    Example: ``EngineHealth(version=7, running=128, waiting=40, generated=81_023, prefilled=20_511, recomputed=9_310,
    interrupted=412, preempted=0, wasted=0, updates=7, busy_seconds=3.2)``
    """

    version: Whole  # policy version of the weights in the model
    running: Count  # completions in a slot
    waiting: Count  # completions that wait for a slot
    generated: Count  # tokens sampled
    prefilled: Count  # prompt tokens computed, once per group that enters together
    recomputed: Count  # tokens computed again because an update or a full KV cache dropped their entries
    interrupted: Count  # completions interrupted by an update, counted at each update
    preempted: Count  # completions that lost their KV entries because the cache was full, counted each time
    wasted: Count  # tokens sampled for aborted requests, including tokens of completions that had ended
    updates: Count  # versions loaded
    busy_seconds: Moment  # time spent in steps and in loading
    unfinished: Whole = 0  # tokens sampled for open requests, including tokens of completions that have ended
    needed: Moment = 0.0  # demand of open completions / supply: of rows or of KV cache, the larger; above 1 some wait
    checked: Count = 0  # bytes of published versions read so far; grows during a load
    resident: Count = 0  # resident memory of the engine's processes in bytes


class Progress(NamedTuple):
    """New tokens of a completion. In the last `Progress` of a completion the segment has a stop reason. `top_logprobs`:
    of each token, empty if not wanted."""

    request: str
    member: int
    segment: Segment
    top_logprobs: Sequence[Likeliest] = ()  # empty if not wanted


class NewToken(Record, frozen=True, array_like=True, gc=False):
    """A token that one step has sampled for the completion `member` of `request`, whose tokens before it were passed on
    already. `logprob`: at sampling, in nats. `likeliest`: its top log-probabilities, if wanted."""

    request: str
    member: int
    token: int
    logprob: float  # at sampling, in nats
    version: int  # of the policy
    likeliest: Likeliest = ()  # its top log-probabilities, if the request wants them

    def progress(self) -> Progress:
        """This token as a `Progress`."""
        segment = Segment.of((self.token,), (self.logprob,), (self.version,))
        return Progress(self.request, self.member, segment, (self.likeliest,) if self.likeliest else ())


#: Yields completions as they end, in any order; requests passed together start in the same step.
Generate = Callable[[*tuple[GenerateRequest, ...]], AsyncIterator[Completion]]


class Engine(Protocol):
    """Client of one engine. Calls may overlap, and each has its own deadline, after which it raises DeadlineExceeded.
    If the engine cannot be reached, they raise EngineLost."""

    def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Sample all completions, one per seed of every request, and yield each as it ends. Leaving the iteration early
        aborts the rest.

        Raises:
            RefusedRequest: the engine refused one request; none of them is sampled.
            EngineLost: the engine cannot be reached, is stopping, or ended before the last completion.
            DeadlineExceeded: no completion ended within the client's deadline.
        """

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        """Load a published version. `ask` returns the challenge to send for a version, which the engine answers with
        its scores; None: no challenge. Returns the version that samples the next token, and the scores. A version that
        is loaded and proven is not loaded again, but answers the challenge.

        Raises:
            TornPublication: the publication is incomplete, or not of this model; the engine keeps its version.
            RefusedRequest: the version is older than the version in use.
            EngineLost: the engine cannot be reached, or is stopping.
            DeadlineExceeded: the load made no progress within the client's deadline.
        """

    async def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """Return the new tokens of unfinished completions, by request id and member. `known`: by request id, the number
        of tokens of each member that the caller already has. Requests that are not in `known` are left out."""

    async def abort(self, request_id: str | list[str]) -> None:
        """Abort a request or several; a `generate` of theirs ends with EngineLost. Unknown ids are ignored."""

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Return the log-probabilities (nats) of all tokens but the first of each text (token ids), by the version in
        use, at temperature 1."""

    async def health(self) -> EngineHealth:
        """Return the version in use, queue lengths and counters."""

    async def moved(self) -> object:
        """Return a number or text that changes while the transfer or load of a version makes progress; None if the
        engine does not reply."""

    async def spans(self) -> list[Span]:
        """Return the engine's spans (timed activities) since the last call; the engine forgets them."""

    def break_off(self) -> None:
        """Close every connection at once; open calls end with EngineLost."""

    async def close(self) -> None:
        """Close the connections that are not in use; call it when all calls have ended."""


def json_rule(schema: Mapping[str, Any] | None) -> str:
    """Right-hand side of a grammar rule for JSON that follows a JSON schema; any object if None.

    >>> json_rule({"type": "null"})[:29]
    '%json {"type": "null", "x-gui'

    Raises:
        RefusedRequest: the schema is nested beyond Python's recursion limit.
    """
    told = {"type": "object"} if schema is None else schema
    try:
        return f"%json {json.dumps({**told, 'x-guidance': _WRITTEN})}"
    except RecursionError:
        raise RefusedRequest("sampling.grammar", "a schema nested too deeply", "fewer levels") from None


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """A complete grammar for JSON that follows a JSON schema; any object if None. Raises RefusedRequest if the schema
    is nested beyond Python's recursion limit."""
    return f"start: {json_rule(schema)}"
