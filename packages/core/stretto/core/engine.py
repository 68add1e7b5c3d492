"""The Protocol of an engine, as the loop uses it, and what one request may ask for at most.

The HTTP client of the native engine (`engine.http.client`) satisfies it; clients of other engines can.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from stretto.core.canary import Ask, Loaded
from stretto.core.errors import RefusedRequest
from stretto.core.events import Span
from stretto.core.records import Completion, GenerateRequest, Likeliest, Partials, Record, Segment

MOST_STOPS = 64  #: stop texts of one request
#: Stop tokens of one request; every row of an engine has room for the most that any request has had.
MOST_STOP_TOKENS = 256
MOST_COMPLETIONS = 65_536  #: completions of one request
MOST_INTERRUPTIONS = 2**31 - 1  #: of one completion
COLDEST = 1e-3  #: temperature; below it logits / temperature leaves the range of float32
LONGEST_STOP = 256  #: characters of a stop text
MOST_LIKELIEST = 20  #: top log-probabilities of each token of a completion
MOST_GRAMMAR = 32_768  #: characters; what is compiled of more could hold an engine for seconds

#: JSON as most models write it, with one way to write each value: a model cannot go on with spaces for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class EngineHealth(Record, frozen=True):
    """The state of an engine. Counters count from its start.

    Example: ``EngineHealth(version=7, running=128, waiting=40, generated=81_023, prefilled=20_511, recomputed=9_310,
    interrupted=412, preempted=0, wasted=0, updates=7, busy_seconds=3.2)``
    """

    version: int  # policy version of the weights in the model
    running: int  # completions in a slot
    waiting: int  # completions that wait for a slot
    generated: int  # tokens sampled
    prefilled: int  # prompt tokens computed, once per group that enters together
    recomputed: int  # tokens computed again because an update or a full KV cache dropped their entries
    interrupted: int  # completions interrupted by an update, counted at each update
    preempted: int  # completions that lost their KV entries because the cache was full, counted each time
    wasted: int  # tokens sampled for aborted requests, those of ended completions included
    updates: int  # versions loaded
    busy_seconds: float  # time spent in steps and in loading
    unfinished: int = 0  # tokens sampled for open requests, those of ended completions included
    needed: float = 0.0  # rows or KV cache for all open completions, over what there is, the larger; above 1 some wait
    checked: int = 0  # bytes of versions that it has read: they grow while it loads one
    resident: int = 0  # bytes of memory of its processes, as their machine sees them


class Progress(NamedTuple):
    """New tokens of a completion. The last ones have a stop reason."""

    request: str
    member: int
    segment: Segment
    top_logprobs: Sequence[Likeliest] = ()  # empty if not wanted


class Generate(Protocol):
    """Completions as they end, in no order; requests that are given together begin in the same step."""

    def __call__(self, *requests: GenerateRequest) -> AsyncIterator[Completion]: ...


class Engine(Protocol):
    """One engine. Calls may overlap, and each has a deadline of its own."""

    def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        """Completions as they end, one per seed of every request. Leaving the iteration early aborts the rest.

        Raises:
            RefusedRequest: the engine will not serve one of them, and so none.
            EngineLost: it cannot be reached, is stopping, or ended before the last completion.
            DeadlineExceeded: no completion ended in time.
        """
        ...

    async def update(self, version: int, ask: Ask | None = None) -> Loaded:
        """Load a published version, and answer the question that `ask` has for it; returns the version that samples
        the next token. An engine that has the version and has proven it does not load it again.

        Raises:
            TornPublication: the publication is not whole, or not of this model; the engine keeps its version.
            EngineLost, DeadlineExceeded: as for `generate`.
        """
        ...

    async def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """The new tokens of unfinished completions, after the `known` number of each member by request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Give up a request; its `generate` ends with EngineLost."""
        ...

    async def score(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """The log-probabilities of all tokens but the first of each text by the version in use, at temperature 1."""
        ...

    async def health(self) -> EngineHealth:
        """Version, queue and counters."""
        ...

    async def moved(self) -> object:
        """What changes while a version comes to it or is loaded, however long that takes; None: it does not say."""
        ...

    async def spans(self) -> list[Span]:
        """The engine's spans since the last call."""
        ...

    def break_off(self) -> None:
        """Close every connection at once: what is open ends with EngineLost."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


def json_rule(schema: Mapping[str, Any] | None) -> str:
    """The right side of a rule of a grammar: JSON that follows a schema; any object without one.

    >>> json_rule({"type": "null"})[:29]
    '%json {"type": "null", "x-gui'

    Raises:
        RefusedRequest: the schema is nested too deeply to be written.
    """
    told = {"type": "object"} if schema is None else schema
    try:
        return f"%json {json.dumps({**told, 'x-guidance': _WRITTEN})}"
    except RecursionError:
        raise RefusedRequest("sampling.grammar", "a schema nested too deeply", "fewer levels") from None


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """The grammar of a completion that is JSON; see `json_rule`."""
    return f"start: {json_rule(schema)}"
