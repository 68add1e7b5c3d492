"""Numbers that a machine or an engine sends, and numbers that a run writes down.

Promises: no NaN, no infinity and no number beyond 2^53 or 10^10 seconds passes the reader of a message; a log and a
ledger refuse what their own readers would refuse, and a fact that cannot be read is an error of the store.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.canary import Loaded, Scores
from stretto.core.engine import EngineHealth
from stretto.core.errors import StoreError, WireError
from stretto.core.events import Span
from stretto.core.frames import encoded
from stretto.core.records import Segment, Verdict
from stretto.engine.http.client import decoded
from stretto.loop.engines.proving import _shortened
from stretto.loop.records.totals import Tenure
from stretto.rewards.service.wire import FromWorker, Verdicts
from stretto.store.series.lines import SpanLog
from stretto.store.totals import TOTALS, Totals
from stretto_cluster.messages import (
    FROM_AGENT,
    FROM_CALLER,
    Beat,
    FromAgent,
    FromCaller,
    Join,
    Leaving,
    LogText,
    Look,
    MachineReady,
    Mirrored,
    RoleEnded,
    RolePlace,
    RoleStarted,
    Scale,
)
from stretto_report.reading.series import read_spans
from tests.store.make import RIGHT, ledger_at, sampled

HEALTH = EngineHealth(7, 1, 2, 3, 4, 5, 6, 7, 8, 9, busy_seconds=3.5, unfinished=1, needed=0.5, checked=9, resident=8)
SPAN = Span("engine-1", "pull", 1.5, 2.5, version=3, bytes=9)
OF_AGENTS = [
    MachineReady((RolePlace("host:1", "/s"),), "/m", "/b"),
    Beat(sent=1.5, clock_offset=-2.5, moved=3),
    Mirrored(version=1, size=2, seconds=0.5),
    RoleStarted(0, 1),
    RoleEnded(0, 1, "killed", killed=True),
    LogText("engine-0", "text"),
    Leaving("asked"),
]
OF_CALLERS = [
    Join("engine", "host", 2, "1.0", served=Tenure(3, "a"), gpus=4),
    Look("run", Tenure(2, "b"), "host:1"),
    Scale(3, "1.0"),
]
MESSAGES: list[tuple[Any, Any]] = [
    *((message, FROM_AGENT.decode) for message in OF_AGENTS),
    *((message, FROM_CALLER.decode) for message in OF_CALLERS),
    (HEALTH, lambda body: decoded(body, EngineHealth)),
    ([SPAN], lambda body: decoded(body, list[Span])),
    (Loaded(4, Scores((-0.5,), decoded=1, compared=2)), lambda body: decoded(body, Loaded)),
    (sampled((0, 1)), lambda body: decoded(body, Segment)),
    (Verdicts(1, (RIGHT,), 1.5, 2.5), lambda body: msgspec.msgpack.decode(body, type=FromWorker)),
]
#: Numbers that other code judges: of scores `canary.distance`, of tokens their checksum and `GuestEngine._check`; the
#: engine pool replaces `engines` and drops the others; a worker's rewards come from `judging.verdict_of`.
ELSEWHERE: dict[type, set[str | int]] = {Scores: {"logprobs"}, Segment: {2, 3, 6, 7, 9}, Verdict: {"reward"}}
#: The tag of a message, and a role's log, of which the gate keeps 64 MiB.
TEXTS_ELSEWHERE = {"type", "text"}
BAD = st.sampled_from([math.nan, math.inf, -math.inf, 1e300, -1e300, 2**53, -(2**53), 2**63, -(2**63), 2**64 - 1])


def test_every_message_has_an_example() -> None:
    assert {type(message) for message in OF_AGENTS} == set(get_args(FromAgent))
    assert {type(message) for message in OF_CALLERS} == set(get_args(FromCaller))


def numbers(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all numbers of a message, but those that other code judges."""
    if isinstance(value, msgspec.Struct):
        listed = bool(value.__struct_config__.array_like)
        names: list[str | int] = [*range(len(value.__struct_fields__))] if listed else [*value.__struct_fields__]
        for name, field in zip(names, value.__struct_fields__, strict=True):
            if name not in ELSEWHERE.get(type(value), ()):
                yield from numbers(getattr(value, field), (*place, name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from numbers(part, (*place, index))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place


def changed(message: object, place: tuple[str | int, ...], number: float | str) -> bytes:
    plain = whole = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    for name in place[:-1]:
        plain = plain[name]
    plain[place[-1]] = number
    return msgspec.msgpack.encode(whole)


def test_the_examples_pass_and_have_numbers() -> None:
    found = [place for message, read in MESSAGES for place in numbers(message) if read(msgspec.msgpack.encode(message))]
    assert len(found) == 43


@given(BAD, st.data())
def test_no_number_without_bounds_passes_the_reader_of_a_message(number: float, data: st.DataObject) -> None:
    message, read = data.draw(st.sampled_from([pair for pair in MESSAGES if any(numbers(pair[0]))]))
    body = changed(message, data.draw(st.sampled_from([*numbers(message)])), number)
    with pytest.raises((WireError, msgspec.ValidationError)):
        read(body)


def texts(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The places of all texts of a message, but those that other code judges."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name not in TEXTS_ELSEWHERE:
                yield from texts(part, (*place, name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from texts(part, (*place, index))
    elif isinstance(value, str):
        yield place


def test_no_text_without_bounds_passes_the_reader_of_a_message() -> None:
    """Words are kept: in the roster, in totals, in the log. A whole message of an agent has at most 1 MiB."""
    longest = dict[tuple[str, str | int], int]()
    for message, read in MESSAGES[: len(OF_AGENTS) + len(OF_CALLERS) + 2]:
        for place in texts(msgspec.msgpack.decode(msgspec.msgpack.encode(message))):
            refused = (size for size in (257, 4097, (64 << 10) + 1) if not passes(message, place, "x" * size, read))
            longest[type(message).__name__, place[-1]] = next(refused, 1 << 20) - 1
    assert set(longest.values()) == {256, 4096, 64 << 10}
    assert sum(length > 256 for length in longest.values()) == 6


def passes(message: object, place: tuple[str | int, ...], text: str, read: Any) -> bool:
    try:
        read(changed(message, place, text))
    except (WireError, msgspec.ValidationError):
        return False
    return True


def test_what_an_engine_calls_a_tensor_or_itself_is_not_kept_whole(tmp_path: Path) -> None:
    """A proof is kept in the ledger, and time by role in the totals."""
    assert sum(map(len, _shortened(("x" * 10**6, "y" * 10**6, "z", "w")))) < 1000


@given(st.lists(st.floats() | st.integers(-(2**70), 2**70), max_size=6))
def test_a_log_of_any_numbers_can_be_read(tmp_path_factory: pytest.TempPathFactory, numbers: list[float]) -> None:
    path = tmp_path_factory.mktemp("log") / "spans.jsonl"
    good, log = Span("engine-0", "generate", 1.0, 2.0), SpanLog(path)
    for number in numbers:
        log.append([Span("engine-0", "generate", number, 2.0), good])
    lost = sum(not -1e10 <= number <= 1e10 for number in numbers)  # also NaN
    assert log.lost == lost
    assert read_spans(path).count(good) >= len(numbers)
    assert len(read_spans(path)) == 2 * len(numbers) - lost


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_ledger_refuses_a_fact_that_it_could_not_read(tmp_path: Path, number: float) -> None:
    refused = [Totals(None, wall_seconds=number), Totals(None, activities={"engine-0": {"pull": number}}), [number]]
    with ledger_at(tmp_path / "ledger.sqlite") as ledger:
        ledger.put(TOTALS, Totals(None, generated=3))
        for fact in refused:
            with pytest.raises(StoreError, match="cannot be written"):
                ledger.put(TOTALS, fact)
        assert ledger.get(TOTALS, Totals) == Totals(None, generated=3)
        ledger.put(TOTALS, Totals(max_staleness=math.inf))  # no bound
        assert ledger.get(TOTALS, Totals) == Totals(max_staleness=None)


def test_a_fact_of_another_kind_is_an_error_of_the_store(tmp_path: Path) -> None:
    with ledger_at(tmp_path / "ledger.sqlite") as ledger:
        ledger.put(TOTALS, {"generated": None})
        with pytest.raises(StoreError, match=r"ledger\.sqlite: totals cannot be read"):
            ledger.get(TOTALS, Totals)


def test_json_that_its_reader_refuses_is_not_made() -> None:
    assert encoded({"a": (SPAN,), "b": 0.5}) == msgspec.json.encode({"a": (SPAN,), "b": 0.5})
    for value in (Span("a", "b", math.nan, 1.0), [Totals(None, rl_seconds=math.inf)], {"a": math.nan}):
        with pytest.raises(msgspec.ValidationError):
            encoded(value)
