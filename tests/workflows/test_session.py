"""A program that begins again with what is on record makes the forest that it would have made without the crash,
wherever that came: no turn is sampled twice, no call is made twice, and unfinished turns go on behind their tokens."""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import CallInterrupted, EngineLost, StoreError
from stretto.core.forest import Tokens, TurnRequest
from stretto.core.records import NOTHING, PROMPT, Completion, GenerateRequest, Prompt, Sampling, Segment, StopReason
from stretto.loop.engines.in_flight import InFlight
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_unfinished
from stretto_workflows.session import MemoryRecord, Session, Turn, WholeTurns, joined_pieces
from stretto_workflows.sessions import sessions_of_run

PROMPT_TOKENS = (7, 8)
SAMPLING = Sampling(max_tokens=4)
Program = Callable[[Session], Coroutine[Any, Any, None]]


class Crash(BaseException):
    """The process ends here."""


@dataclass
class World:
    """What survives a crash, and what it counts. A crash comes when `steps` things were put on record."""

    record: MemoryRecord = field(default_factory=MemoryRecord)
    steps: int = 10**9
    sampled: int = 0
    made: Counter[bytes] = field(default_factory=Counter)

    def step(self) -> None:
        if not self.steps:
            raise Crash
        self.steps -= 1

    def journal(self, node: int, piece: Segment) -> None:
        self.step()
        self.record.journal(node, piece)

    def begin_call(self, number: int, asked: bytes, durable: bool) -> None:
        self.step()
        self.record.begin_call(number, asked, durable)

    def end_call(self, number: int, reply: bytes) -> None:
        self.step()
        self.record.end_call(number, reply)

    async def sample(self, request: TurnRequest) -> Segment:
        """Token after token; each follows from the seed and its place, as those of an engine do."""
        whole = request.prefix
        length = 1 + request.seed % 3
        for at in range(len(whole.token_ids), length):
            await asyncio.sleep(0)
            token = int.from_bytes(hashlib.sha256(f"{request.seed} {at}".encode()).digest()[:1]) % 3
            piece = Segment.of((token,), (-0.5,), (0,), stop_reason=StopReason.STOP if at == length - 1 else None)
            self.journal(request.node, piece)
            self.sampled += 1
            whole += piece
        return whole

    async def call(self, session: Session, asked: bytes) -> bytes:
        async def make() -> bytes:
            self.made[asked] += 1
            return asked[::-1]

        return await session.call(asked, make, repeatable=True)

    def session(self) -> Session:
        return Session("0.17.0/3", PROMPT_TOKENS, 11, self.sample, self, self.record.segments, self.record.calls)


#: A program: threads that run side by side, each of turns (the given tokens behind all before) and calls.
THREADS = st.lists(
    st.lists(st.one_of(st.lists(st.integers(0, 2), max_size=2).map(tuple), st.binary(max_size=1)), max_size=5),
    min_size=1,
    max_size=3,
)


def program(threads: list[list[tuple[int, ...] | bytes]], world: World) -> Program:
    async def thread(session: Session, own: int, steps: list[tuple[int, ...] | bytes]) -> None:
        history: Tokens = (*PROMPT_TOKENS, own)  # equal prompts of two threads are exchangeable
        for step in steps:
            if isinstance(step, bytes):
                history += tuple(await world.call(session, step))
            else:
                history += step
                history += (await session.turn(history, SAMPLING)).segment.token_ids

    async def run(session: Session) -> None:
        await asyncio.gather(*(thread(session, 100 + own, steps) for own, steps in enumerate(threads)))

    return run


def forest_of(session: Session) -> Counter[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each turn with all tokens before it: what a trajectory is, whatever the order of its segments."""
    before = Session("", PROMPT_TOKENS, 0, World().sample, MemoryRecord(), session.segments()).forest
    return Counter(
        (before.tokens(at)[: -len(one.token_ids)], one.token_ids)
        for at, one in enumerate(before.segments)
        if one.sampled
    )


@given(THREADS, st.lists(st.integers(0, 12), max_size=3))
def test_wherever_it_crashes_a_program_makes_the_same_forest_and_no_turn_or_call_twice(
    threads: list[list[tuple[int, ...] | bytes]], crashes: list[int]
) -> None:
    undisturbed = World()
    whole = undisturbed.session()
    asyncio.run(program(threads, undisturbed)(whole))

    world = World()
    for steps in crashes:
        world.steps = steps
        with contextlib.suppress(Crash):
            asyncio.run(program(threads, world)(world.session()))
    world.steps = 10**9
    session = world.session()
    asyncio.run(program(threads, world)(session))
    assert forest_of(session) == forest_of(whole)
    assert world.sampled == undisturbed.sampled
    calls = Counter(call.asked for call in world.record.calls)
    assert calls == undisturbed.made  # each call is on record once, and all have ended
    assert all(call.reply == call.asked[::-1] for call in world.record.calls)


class FullDisk(World):
    """Of what is put on record, the thing after `steps` others fails, and no later one. A turn is put on record when
    it has ended."""

    def step(self) -> None:
        self.steps -= 1
        if self.steps == -1:
            raise OSError

    async def sample(self, request: TurnRequest) -> Segment:
        segment = Segment.of((request.seed % 3,), (-0.5,), (0,), stop_reason=StopReason.STOP)
        self.journal(request.node, segment)
        return segment


@given(
    st.lists(st.one_of(st.lists(st.integers(0, 2), max_size=2).map(tuple), st.binary(max_size=1))), st.integers(0, 9)
)
def test_whichever_write_fails_nothing_has_happened_and_the_record_is_the_session(
    steps: list[tuple[int, ...] | bytes], failing: int
) -> None:
    world = FullDisk(steps=failing)
    session = world.session()

    async def tried(step: tuple[int, ...] | bytes, history: Tokens) -> Tokens:
        if isinstance(step, bytes):
            return history + tuple(await world.call(session, step))
        return history + step + (await session.turn(history + step, SAMPLING)).segment.token_ids

    async def run() -> None:
        history: Tokens = PROMPT_TOKENS
        for step in steps:
            try:
                history = await tried(step, history)
            except OSError:
                restored = world.session()  # as after a kill
                assert (restored.forest.segments, restored.calls) == (session.forest.segments, session.calls)
                history = await tried(step, history)

    asyncio.run(run())
    restored = world.session()
    assert (restored.forest.segments, restored.calls) == (session.forest.segments, session.calls)
    assert all(call.reply == call.asked[::-1] for call in restored.calls if call.reply is not None)


def test_a_piece_behind_a_gap_is_refused() -> None:
    with pytest.raises(StoreError, match="segment 1 is missing, and segment 2 is there"):
        joined_pieces([(0, Segment.of((1,))), (2, Segment.of((3,)))])


@given(THREADS)
def test_a_session_that_begins_again_needs_no_engine_and_no_call(threads: list[list[tuple[int, ...] | bytes]]) -> None:
    world = World()
    session = world.session()
    asyncio.run(program(threads, world)(session))
    sampled, made = world.sampled, sum(world.made.values())
    again = session.again()
    asyncio.run(program(threads, world)(again))
    assert (world.sampled, sum(world.made.values())) == (sampled, made)
    assert again.segments() == session.segments()


def turns(world: World, *prompts: tuple[int, ...]) -> list[Turn]:
    async def run() -> list[Turn]:
        session = world.session()
        return [await session.turn(prompt, SAMPLING) for prompt in prompts]

    return asyncio.run(run())


def test_equal_prompts_get_turns_of_their_own_and_other_random_numbers() -> None:
    one, two, three = turns(World(), *[PROMPT_TOKENS] * 3)
    assert [turn.node for turn in (one, two, three)] == [0, 1, 2]
    assert len({turn.segment.token_ids for turn in (one, two, three)}) > 1


def test_a_single_turn_is_one_segment_that_names_no_parent() -> None:
    session = World().session()
    asyncio.run(session.turn(PROMPT_TOKENS, SAMPLING))
    [segment] = session.segments()
    assert (segment.parent, segment.cause, segment.reward) == (None, "", None)


def test_a_prompt_that_begins_otherwise_is_a_branch_with_its_cause() -> None:
    session = World().session()
    asyncio.run(session.turn(PROMPT_TOKENS, SAMPLING))
    asyncio.run(session.turn((1, 2), SAMPLING, cause="subagent"))
    _, given_tokens, sampled = session.segments({2: 0.5})
    assert (given_tokens.token_ids, given_tokens.parent, given_tokens.cause) == ((1, 2), NOTHING, "subagent")
    assert (sampled.parent, sampled.reward) == (None, 0.5)  # behind the one before it


def test_a_turn_that_breaks_off_is_no_part_of_the_trajectory_until_the_next_one_goes_on_with_it() -> None:
    world = World(steps=1)  # it begins, and no token comes
    session = world.session()
    with pytest.raises(Crash):
        asyncio.run(session.turn(PROMPT_TOKENS, SAMPLING))
    assert session.segments() == ()
    world.steps = 10**9
    turn = asyncio.run(session.turn(PROMPT_TOKENS, SAMPLING))
    assert turn.node == 0
    assert session.segments()[0].token_ids == turn.segment.token_ids == joined_pieces(world.record.pieces)[0].token_ids


def test_a_turn_that_breaks_off_is_not_gone_on_with_by_one_that_may_have_fewer_tokens_or_ends_otherwise() -> None:
    world = World()
    asked: list[tuple[int, int]] = []

    async def sample(request: TurnRequest) -> Segment:
        """Breaks off behind three tokens."""
        asked.append((request.node, request.sampling.max_tokens))
        if len(asked) == 1:
            world.journal(request.node, Segment.of((1, 1, 1), (-0.5,) * 3, (0,) * 3))
            raise Crash
        return Segment.of((2,), (-0.5,), (0,), stop_reason=StopReason.STOP)

    def opened() -> Session:
        return Session("0.17.0/3", PROMPT_TOKENS, 11, sample, world, world.record.segments, world.record.calls)

    def nodes(session: Session, *wanted: Sampling) -> list[int]:
        return [asyncio.run(session.turn(PROMPT_TOKENS, one)).node for one in wanted]

    first = opened()
    with pytest.raises(Crash):
        nodes(first, SAMPLING)
    after_the_crash = opened()
    again = first.again()
    shorter, stopped = Sampling(max_tokens=3), Sampling(max_tokens=4, stop=("!",))
    assert nodes(first, shorter, stopped, SAMPLING) == [1, 2, 0]
    assert nodes(again, shorter, stopped, SAMPLING) == [1, 2, 0]
    assert nodes(after_the_crash, shorter, SAMPLING) == [1, 0]  # which stop texts it had is not on record
    assert first.returned == [0, 1, 2]


def test_a_call_that_was_cut_short_is_made_again_only_if_it_may_be() -> None:
    world = World(steps=1)  # it begins
    with pytest.raises(Crash):
        asyncio.run(world.call(world.session(), b"pay"))
    world.steps = 10**9

    async def pay() -> bytes:
        raise AssertionError("a second time")

    with pytest.raises(CallInterrupted, match=r"the call 'pay' of 0\.17\.0/3 was cut short"):
        asyncio.run(world.session().call(b"pay", pay, repeatable=False))
    assert asyncio.run(world.call(world.session(), b"pay")) == b"yap"
    assert world.made == {b"pay": 2}


def test_a_call_that_was_cut_short_is_not_made_again_in_other_words() -> None:
    world = World()

    async def pay() -> bytes:
        world.made[b"pay"] += 1
        if world.made[b"pay"] == 1:
            raise Crash
        return b"paid"

    async def run(session: Session, *asked: bytes) -> list[bytes]:
        return [await session.call(one, pay, repeatable=False) for one in asked]

    with pytest.raises(Crash):
        asyncio.run(run(world.session(), b"pay 3 euros"))
    again = world.session()
    assert asyncio.run(world.call(again, b"look")) == b"kool"  # what is repeatable does not pay
    with pytest.raises(CallInterrupted, match=r"the call 'pay 3 euros' of 0\.17\.0/3 was cut short"):
        asyncio.run(run(again, b"pay 3.00 euros"))
    with pytest.raises(CallInterrupted, match="pay 3 euros"):
        again.check_calls()  # nor does a program that does without it know what it has done
    assert world.made == {b"pay": 1, b"look": 1}


def test_a_call_that_has_ended_is_answered_and_does_not_stand_in_the_way() -> None:
    world = World()

    async def pay() -> bytes:
        world.made[b"pay"] += 1
        return b"paid"

    async def run(*asked: bytes) -> list[bytes]:
        session = world.session()
        return [await session.call(one, pay, repeatable=False) for one in asked]

    assert asyncio.run(run(b"3", b"4")) == asyncio.run(run(b"4", b"3", b"5"))[:2] == [b"paid"] * 2
    assert world.made == {b"pay": 3}


def test_a_turn_that_is_asked_for_again_is_another_request_of_an_engine_without_a_run() -> None:
    """Which may not have given the first one up yet."""
    asked: list[str] = []

    async def generate(*requests: GenerateRequest) -> AsyncIterator[Completion]:
        for request in requests:
            asked.append(request.id)
            if len(asked) > 1:
                yield Completion(
                    request.id,
                    0,
                    Segment.of(
                        token_ids=(4, 2), behavior_logprobs=(-0.5, -0.5), versions=(0, 0), stop_reason=StopReason.STOP
                    ),
                )

    record = MemoryRecord()
    session = Session("0.17.0/3", PROMPT_TOKENS, 5, WholeTurns(generate, record, "a"), record)
    with pytest.raises(EngineLost, match=r"a#0\.0"):
        asyncio.run(session.turn(PROMPT_TOKENS, SAMPLING))
    assert asyncio.run(session.turn(PROMPT_TOKENS, SAMPLING)).segment.token_ids == (4, 2)
    assert asked == ["a#0.0", "a#0.1"]


def test_what_a_changed_program_does_not_ask_for_again_is_left_out() -> None:
    world = World()
    turns(world, PROMPT_TOKENS, (*PROMPT_TOKENS, 1))
    session = world.session()
    asyncio.run(session.turn((*PROMPT_TOKENS, 1), SAMPLING))
    told, said = session.segments()
    assert (told.token_ids, said.sampled) == ((1,), True)


def test_segments_are_of_an_earlier_version_if_they_were_there_when_a_run_first_went_on_with_this_one(
    tmp_path: Path,
) -> None:
    path, prompt, piece = (
        tmp_path / "ledger.sqlite",
        Prompt("17", PROMPT_TOKENS, "", ""),
        Segment.of((4,), parent=PROMPT),
    )
    engines: Any = None  # nothing is sampled

    def process(begins: str, node: int) -> list[int]:
        with closing(Ledger(path, StoreConfig())) as ledger:
            opened = sessions_of_run(InFlight(engines, ledger), ledger, read_unfinished(path), renders=True)
            found = [opened(f"{group}/0", PROMPT_TOKENS, 0).earlier for group in ("0.1.0", "0.2.0")]
            ledger.issue(begins, prompt, 1, 0)
            ledger.journal("0.1.0/0", piece, node)
            ledger.journal(f"{begins}/0", piece)
            return found

    with closing(Ledger(path, StoreConfig())) as ledger:
        ledger.issue("0.1.0", prompt, 1, 0)
        ledger.journal("0.1.0/0", piece)
    assert process("0.2.0", 1) == [1, 0]
    assert process("0.3.0", 2) == [1, 0]
