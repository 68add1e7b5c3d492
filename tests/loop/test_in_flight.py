"""What is written of answers in flight is journaled, and every token of it once, under the name of the engine that
wrote it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import EngineLeft, EngineLied, EngineLost, RefusedRequest
from stretto.core.forest import TurnRequest
from stretto.core.records import Completion, GenerateRequest, Partials, Prompt, Sampling, Segment, StopReason
from stretto.loop.engines.in_flight import GroupInFlight, InFlight, _Prefix
from stretto.loop.engines.router import LOSSES, attempts
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_unfinished
from stretto_workflows.sessions import sessions_of_evaluation
from tests.store.make import completion

ANSWER = tuple(range(100, 110))


SAMPLING = Sampling(max_tokens=20)
REQUEST = GenerateRequest(id="7", prompt_token_ids=(1,), seeds=(0,), sampling=SAMPLING)


class SlowToTell:
    """An engine that writes one answer for ever, and takes its time to tell how far it has come."""

    async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        await asyncio.get_running_loop().create_future()
        yield completion(request.id)

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        await asyncio.sleep(0.01)
        return {id: {0: written(count, 10)} for id, (count,) in known.items() if count < len(ANSWER)}


class Journal:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.whole = Segment()

    def journal(self, id: str, partial: Segment, node: int = 0) -> None:
        self.tokens += partial.token_ids
        self.whole += partial

    def retract(self, id: str, count: int, node: int = 0) -> None:
        raise AssertionError("an engine that was killed has told the truth")


async def test_two_who_look_at_the_same_time_journal_a_token_once() -> None:
    journal = Journal()

    answers = InFlight(SlowToTell(), journal, {})

    answering = asyncio.ensure_future(anext(answers.generate(REQUEST)))
    await asyncio.sleep(0)
    await asyncio.gather(answers.keep(), answers.keep(1.0), answers.keep())
    answering.cancel()
    assert journal.tokens == list(ANSWER)


class LostAfterFour:
    """Two engines: `a` writes four tokens and is lost, `b` goes on with three, and then ends with the last three."""

    def __init__(self) -> None:
        self.told, self.go_on, self.begun = 4, asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        first = not request.prefixes
        self.begun.set()
        await self.go_on.wait()
        self.go_on.clear()
        if first:
            raise EngineLost("a", "was killed")
        segment = written(0, 10, StopReason.STOP)
        yield Completion(request.id, 0, segment).written_by("b", request.prefixes[0])

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        name = "a" if self.told == 4 else "b"
        return {id: {0: written(count, self.told).written_by(name)} for id, (count,) in known.items()}


def written(begin: int, end: int, stop: StopReason | None = None) -> Segment:
    length = end - begin
    return Segment.of(ANSWER[begin:end], (-0.5,) * length, (0,) * length, stop_reason=stop)


async def test_a_completion_that_moves_after_a_kill_is_journaled_under_both_names() -> None:
    journal = Journal()

    engines = LostAfterFour()
    in_flight = InFlight(engines, journal, {})

    async def answered() -> list[Completion]:
        return [completion async for completion in in_flight.generate(REQUEST)]

    answering = asyncio.ensure_future(answered())
    for told in (4, 7):
        await engines.begun.wait()
        engines.begun.clear()
        engines.told = told
        await in_flight.keep()
        assert (in_flight.sampled("7"), in_flight.sampled("8")) == (told, 0)
        engines.go_on.set()
    completions = await answering
    assert in_flight.sampled("7") == 10
    await in_flight.keep()
    (completion,) = completions
    assert completion.engines == (("a", 4), ("b", 6))
    assert journal.whole == completion.segment


class LiesAfterFour(LostAfterFour):
    """As its parent, but `a` goes on behind two tokens that another engine wrote, and of its own four one cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, ...]] = []

    async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        self.asked.append(request.prefixes[0].token_ids if request.prefixes else ())
        self.begun.set()
        await self.go_on.wait()
        self.go_on.clear()
        if len(self.asked) < 3:
            raise (EngineLost if len(self.asked) == 1 else EngineLied)("an engine", "is gone")
        segment = written(0, 10, StopReason.STOP)
        yield Completion(request.id, 0, segment).written_by("c", request.prefixes[0])

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        name = "abc"[len(self.asked) - 1]
        return {id: {0: written(count, self.told).written_by(name)} for id, (count,) in known.items()}


async def test_what_a_server_told_of_a_request_of_which_it_lied_is_in_no_journal_or_completion(tmp_path: Path) -> None:
    """`a` writes two tokens and is killed; `b` tells four more, the last of them NaN, say; `c` goes on behind two."""
    path, in_file = tmp_path / "ledger.sqlite", list[int]()

    with closing(Ledger(path, StoreConfig(flush_seconds=0.0))) as ledger:
        ledger.issue("7", Prompt(id="17", token_ids=(1,), text="1", answer="2"), 1, 0)
        engines = LiesAfterFour()
        in_flight = InFlight(engines, ledger, {})
        answering = asyncio.ensure_future(anext(in_flight.generate(REQUEST)))
        for told in (2, 4, 6, 3):
            if told != 6:
                await engines.begun.wait()
                engines.begun.clear()
            engines.told = told
            await in_flight.keep()
            ledger.flush()
            in_file.append(len(read_unfinished(path)[0].members[0].segments[0].token_ids))
            if told != 4:
                engines.go_on.set()
        completion = await answering
    assert engines.asked == [(), ANSWER[:2], ANSWER[:2]]
    assert in_file == [2, 4, 6, 3]
    assert completion.engines == (("a", 2), ("c", 8))


class LiesOfTheSecond:
    """Two completions: `a` ends the first, and then sends something else that cannot be; `b` writes both."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.ended, self.go_on = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
        self.asked.append(request.seeds)
        name = "ab"[len(self.asked) - 1]
        yield Completion(request.id, 0, written(0, 10, StopReason.STOP)).written_by(name, Segment())
        if name == "a":
            self.ended.set()
            await self.go_on.wait()
            raise EngineLied("a", "is not trusted")
        yield Completion(request.id, 1, written(0, 10, StopReason.STOP)).written_by(name, Segment())

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        return {}


async def test_a_completion_that_ended_before_its_engine_lied_in_the_same_request_is_dropped(tmp_path: Path) -> None:
    path, request = tmp_path / "ledger.sqlite", msgspec.structs.replace(REQUEST, seeds=(0, 1))

    with closing(Ledger(path, StoreConfig(flush_seconds=0.0))) as ledger:
        ledger.issue("7", Prompt(id="17", token_ids=(1,), text="1", answer="2"), 2, 0)
        engines = LiesOfTheSecond()
        in_flight = InFlight(engines, ledger, {})

        async def answered() -> list[Completion]:
            return [completion async for completion in in_flight.generate(request)]

        answering = asyncio.ensure_future(answered())
        await engines.ended.wait()
        await in_flight.keep()
        ledger.flush()
        (on_record,) = read_unfinished(path)[0].members.values()
        assert on_record.segments[0].stop_reason is StopReason.STOP
        engines.go_on.set()
        completions = await answering
        assert engines.asked == [(0, 1), (0, 1)]
        assert read_unfinished(path)[0].members == {}, "nothing of `a`, and nothing of `b` as yet"
    assert [(one.member, one.engines) for one in completions] == [(0, (("b", 10),)), (1, (("b", 10),))]


async def test_a_turn_whose_engine_is_killed_goes_on_behind_its_tokens_and_is_journaled_as_its_segment() -> None:
    pieces: list[tuple[str, Segment, int]] = []

    class Pieces:
        def journal(self, id: str, piece: Segment, node: int = 0) -> None:
            pieces.append((id, piece, node))

        def retract(self, id: str, count: int, node: int = 0) -> None:
            raise AssertionError("an engine that was killed has told the truth")

    engines = LostAfterFour()
    in_flight = InFlight(engines, Pieces(), {})
    in_flight.begin("0.17.0/3")
    asked = TurnRequest(4, (1, 2), SAMPLING, seed=0, prefix=Segment.of(parent=3, cause="fork"))
    turn = asyncio.ensure_future(in_flight.turn("0.17.0/3", asked))
    for told in (4, 7):
        await engines.begun.wait()
        engines.begun.clear()
        engines.told = told
        await in_flight.keep()
        engines.go_on.set()
    whole = await turn
    assert [(id, node) for id, _, node in pieces] == [("0.17.0/3", 4)] * 3  # on record before it returns
    assert in_flight.forget("0.17.0") == whole.length == 10

    assert whole.engines == (("a", 4), ("b", 6))
    assert sum((piece for _, piece, _ in pieces), start=Segment()) == whole


@pytest.mark.parametrize("late", ["before", "during"])
async def test_a_turn_of_a_group_that_was_given_up_is_refused_and_leaves_nothing(late: str) -> None:
    journal = Journal()

    engines = LostAfterFour()
    in_flight = InFlight(engines, journal, {})
    in_flight.begin("0.17.0/3")
    asked = TurnRequest(1, (1, 2), SAMPLING, seed=0, prefix=msgspec.structs.replace(written(0, 4), parent=0))
    if late == "before":
        in_flight.forget("0.17.0")
    turn = asyncio.ensure_future(in_flight.turn("0.17.0/3", asked))
    if late == "during":
        await engines.begun.wait()
        in_flight.forget("0.17.0")
        engines.go_on.set()
    with pytest.raises(RefusedRequest, match=r"0\.17\.0/3 was given up"):
        await turn
    await in_flight.keep()
    assert journal.tokens == []


def test_what_the_turns_of_a_group_have_and_its_trajectories_have_not_is_left_over() -> None:
    class AtOnce(LostAfterFour):
        """Says ten tokens, behind those that are known."""

        async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
            yield Completion(request.id, 0, written(0, 10, StopReason.STOP))

    async def left_over(kept: int) -> int:
        in_flight = InFlight(AtOnce(), Journal(), {})
        # An earlier process has five tokens of turn 1, which nobody asks for any more, and four of turn 2.
        in_flight.begin("0.17.0/3", [Segment.of((1, 2)), written(0, 5), written(0, 4)])
        in_flight.begin("0.17.0/4")
        for session, node, known in (
            ("0.17.0/3", 2, written(0, 4)),
            ("0.17.0/3", 3, Segment()),
            ("0.17.0/4", 0, Segment()),
        ):
            await in_flight.turn(session, TurnRequest(node, (1, 2), SAMPLING, seed=0, prefix=known))
        return in_flight.forget("0.17.0", kept)

    assert [asyncio.run(left_over(kept)) for kept in (0, 20, 35)] == [35, 15, 0]
    assert InFlight(AtOnce(), Journal(), {}).forget("0.17.0", 10) == 0  # a group of single turns, which has no sessions


@pytest.mark.parametrize("session", ["", "a/3"])
def test_groups_in_flight_with_tokens_of_an_engine_and_a_version_are_named_and_what_it_has_now(session: str) -> None:
    def group(engine: str, version: int, *, ended: bool) -> GroupInFlight:
        segment = Segment.of((5,), (-0.1,), (version,), 0, StopReason.STOP, ((engine, 1),))
        if ended:
            return GroupInFlight(ended={0: Completion("a", 0, segment)}, session=session)
        return GroupInFlight(prefixes={0: _Prefix(segment)}, session=session)

    def named(one: GroupInFlight) -> set[str]:
        return InFlight(SlowToTell(), None, {"a:1" if session else "a": one}).tainted("engine-0", 4, {"r"})

    for ended in (False, True):
        assert named(group("engine-0", 4, ended=ended)) == {"a"}
        assert named(group("engine-0", 3, ended=ended)) == named(group("engine-1", 4, ended=ended)) == set()
    assert named(GroupInFlight(request_id="r", session=session)) == {"a"}


@pytest.mark.parametrize("session", ["", "0.17.0/3"])
@given(st.lists(st.booleans(), min_size=1, max_size=4), st.booleans())
def test_what_a_group_that_is_given_up_has_whole_is_left_over(session: str, ended: list[bool], judged: bool) -> None:
    """The engines count what they abort; a request that has ended there is aborted no more, though its reply, or its
    verdict, may still be on the way."""

    class Holds(LostAfterFour):
        """Ends some members with ten tokens each, and does not end its reply before `go_on`."""

        async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
            for member, whole in enumerate(ended):
                if whole:
                    yield Completion(request.id, member, written(0, 10, StopReason.STOP))
            await self.go_on.wait()

    async def left_over() -> int:
        engines = Holds()
        in_flight = InFlight(engines, Journal(), {})
        if session:
            in_flight.begin(session)
            turn = TurnRequest(0, (1, 2), SAMPLING, seed=0, prefix=Segment())
            task: asyncio.Future[Any] = asyncio.ensure_future(in_flight.turn(session, turn))
        else:
            asked = msgspec.structs.replace(REQUEST, id="0.17.0", seeds=tuple(range(len(ended))))
            task = asyncio.ensure_future(anext(in_flight.generate(asked)))
        await asyncio.sleep(0)
        if judged and all(ended):
            engines.go_on.set()
            await asyncio.wait([task])
        task.cancel()
        found = in_flight.forget("0.17.0")
        await asyncio.wait([task])
        return found

    if session:
        ended = ended[:1]
    assert asyncio.run(left_over()) == (10 * len(ended) if all(ended) else 0)


async def test_a_turn_that_is_asked_for_again_before_its_engine_has_let_go_of_it_is_a_request_of_its_own() -> None:
    class SlowToLetGo(LostAfterFour):
        """Has four tokens of the first request, of which it hears late that nobody waits."""

        def __init__(self) -> None:
            super().__init__()
            self.open = set[str]()

        async def generate(self, request: GenerateRequest, *, least: int = 0) -> AsyncIterator[Completion]:
            if request.id in self.open:
                raise RefusedRequest("id", request.id, "an id that no open request uses")
            self.open.add(request.id)
            self.begun.set()
            if len(self.open) == 1:
                await asyncio.get_running_loop().create_future()
            segment = written(0, 10, StopReason.STOP)
            yield Completion(request.id, 0, segment).written_by("a", request.prefixes[0])

        async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
            assert known.keys() == self.open
            return {id: {0: written(count, 4).written_by("a")} for id, (count,) in known.items()}

    journal = Journal()

    engines = SlowToLetGo()
    in_flight = InFlight(engines, journal, {})
    in_flight.begin("0.17.0/3")
    asked = TurnRequest(0, (1, 2), SAMPLING, seed=0, prefix=Segment())
    first = asyncio.ensure_future(in_flight.turn("0.17.0/3", asked))
    await engines.begun.wait()
    await in_flight.keep()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    whole = await in_flight.turn("0.17.0/3", asked)
    assert whole.token_ids == ANSWER
    assert journal.whole == whole


async def test_a_turn_of_an_evaluation_that_is_asked_for_again_is_a_request_of_its_own() -> None:
    asked: list[str] = []

    async def generate(*requests: GenerateRequest) -> AsyncIterator[Completion]:
        (request,) = requests
        asked.append(request.id)
        if len(asked) == 1:
            await asyncio.get_running_loop().create_future()
        yield Completion(request.id, 0, written(0, 10, StopReason.STOP))

    session = sessions_of_evaluation(generate, lambda completion: None)("evaluation..7/0", (1, 2), 0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await session.turn((1, 2), SAMPLING)
    assert (await session.turn((1, 2), SAMPLING)).segment.token_ids == ANSWER
    assert len(set(asked)) == 2


def test_engines_that_leave_the_run_are_no_losses_of_what_they_had() -> None:
    tries = 0
    for attempt in attempts():
        with attempt:
            tries += 1
            if tries <= 2 * LOSSES:
                raise EngineLeft("engine-1", "has left the run")
            break
    assert tries == 2 * LOSSES + 1
    with pytest.raises(EngineLost):
        _lose_engines()


def _lose_engines() -> None:
    for attempt in attempts():
        with attempt:
            raise EngineLost("engine-1", "was killed")
