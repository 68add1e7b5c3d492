"""Rounds of groups.

- What an engine gets together follows from the order of the groups, however they come and whichever engine is lost.
- The answers of a group are delivered once; a loss reaches everybody who waits for the portion, a refusal the refused
  group alone.
- Groups leave in their order when the last one is judged; who is stopped holds nobody up, nor does a whole round.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import EngineLost, RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Prompt, Sampling, Trajectory
from stretto.loop.engines.in_flight import InFlight
from stretto.loop.engines.rounds import Rounds
from stretto.rollout.controller import Ticket
from stretto.rollout.prompts import Draw
from tests.store.make import completion

NAMES = ["0.5.0", "0.3.0", "0.9.0"]


def ticket(name: str, order: int) -> Ticket:
    prompt = Prompt(id=name.split(".")[1], token_ids=(1,), text="", answer="")
    return Ticket(order, name, Draw(epoch=0, prompt=prompt, attempt=0), admitted_version=0, seeds=(1, 2))


TICKETS = [ticket(name, order) for order, name in enumerate(NAMES)]


@dataclass
class Engines:
    """Answers each portion group after group; is lost after as many completions as `ills` says; refuses a portion with
    one of the groups `refused`, before it begins or, of a group in `late`, when it comes to that group."""

    ills: list[tuple[int, Exception]] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    refused: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()

    async def generate(self, *requests: GenerateRequest) -> AsyncIterator[Completion]:
        self.asked.append(tuple(request.id for request in requests))
        if wrong := [request.id for request in requests if request.id in self.refused - self.late]:
            raise RefusedRequest("prompt", wrong[0], "another")
        whole, ill = self.ills.pop(0) if self.ills else (10**9, None)
        for request in requests:
            for member in range(len(request.seeds)):
                await asyncio.sleep(0.001)
                if member and request.id in self.refused:
                    raise RefusedRequest("prompt", request.id, "another")
                if ill is not None and whole == 0:
                    raise ill
                whole -= 1
                yield completion(request.id, member)


def played(engines: Engines, portions: int, slow: str = "", stop: str = "") -> list[str]:
    """Play a round; the groups in the order in which they leave, with what they failed of."""
    left: list[str] = []

    async def main() -> None:
        rounds = Rounds(engines.generate, lambda: TICKETS, portions)
        answers = InFlight(rounds, journal=None)

        async def workflow(ticket: Ticket) -> Sequence[Trajectory]:
            sampling = Sampling(max_tokens=4)
            request = GenerateRequest(id=ticket.group_id, prompt_token_ids=(1,), seeds=ticket.seeds, sampling=sampling)
            found = [completion async for completion in answers.generate(request)]
            assert [completion.member for completion in found] == [0, 1]
            await asyncio.sleep(0.05 if ticket.group_id == slow else 0)
            return []

        together = rounds.together(workflow)

        async def one(ticket: Ticket) -> None:
            try:
                await together(ticket)
                left.append(ticket.group_id)
            except (EngineLost, RefusedRequest) as error:
                left.append(f"{ticket.group_id} {type(error).__name__}")

        tasks = {t.group_id: asyncio.create_task(one(t)) for t in reversed(TICKETS)}
        while not engines.asked:
            await asyncio.sleep(0)
        if stop:
            tasks[stop].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 10)

    asyncio.run(main())
    return left


@pytest.mark.parametrize("slow", ["", *NAMES])
def test_groups_are_dealt_and_leave_in_the_order_of_their_admission(slow: str) -> None:
    engines = Engines()
    assert played(engines, portions=2, slow=slow) == NAMES
    assert sorted(engines.asked) == [("0.3.0",), ("0.5.0", "0.9.0")]


@pytest.mark.parametrize("whole", range(6))
def test_a_portion_whose_engine_is_lost_is_asked_again_as_it_was(whole: int) -> None:
    engines = Engines(ills=[(whole, EngineLost("engine-0", "was killed"))])
    assert played(engines, portions=1) == NAMES
    assert engines.asked == [tuple(NAMES)] * 2


def test_a_portion_that_loses_one_engine_after_the_other_fails_as_a_whole() -> None:
    engines = Engines(ills=[(3, EngineLost("engine-0", "was killed"))] * 9)
    assert played(engines, portions=1) == ["0.5.0", "0.3.0 EngineLost", "0.9.0 EngineLost"]
    assert len(engines.asked) == 4


SOME = st.sets(st.sampled_from(NAMES)).map(frozenset)


@given(SOME, SOME, st.integers(1, 3), st.none() | st.integers(0, 5))
def test_a_refused_group_fails_alone(
    refused: frozenset[str], late: frozenset[str], portions: int, lost: int | None
) -> None:
    """Refused at once or when it has begun, and with an engine that is lost on the way."""
    ills: list[tuple[int, Exception]] = [] if lost is None else [(lost, EngineLost("engine-0", "was killed"))]
    engines = Engines(ills=ills, refused=refused, late=late)
    assert played(engines, portions) == [f"{name} RefusedRequest" if name in refused else name for name in NAMES]


@pytest.mark.parametrize("late", [frozenset(), frozenset(NAMES)])
def test_what_runs_together_follows_from_who_is_refused(late: frozenset[str]) -> None:
    engines = Engines(refused=frozenset(NAMES[1:2]), late=late)
    played(engines, portions=1)
    halves: list[tuple[str, ...]] = [tuple(NAMES[1:2]), tuple(NAMES[2:])]
    alone = [] if late else [tuple(NAMES[:1])]  # it had ended when the other was refused
    assert engines.asked == [tuple(NAMES), *alone, *([] if late else [tuple(NAMES[1:])]), *halves]


@pytest.mark.parametrize("ills", [[], [(4, EngineLost("engine-0", "was killed"))]])
def test_a_group_that_is_stopped_holds_nobody_up(ills: list[tuple[int, Exception]]) -> None:
    assert played(Engines(ills=ills), portions=1, stop="0.9.0") == ["0.5.0", "0.3.0"]


async def test_a_round_may_begin_while_the_groups_of_the_one_before_are_still_being_stopped() -> None:
    admitted, judged = TICKETS[:1], asyncio.Event()

    async def judge() -> None:
        judged.set()
        await asyncio.sleep(60)

    async def workflow(of: Ticket) -> Sequence[Trajectory]:
        if of is TICKETS[0]:
            await asyncio.gather(judge())  # its end takes the loop some rounds
        return []

    together = Rounds(Engines().generate, lambda: admitted, 1).together(workflow)
    before = asyncio.ensure_future(together(TICKETS[0]))
    await judged.wait()
    before.cancel()
    admitted = TICKETS[1:2]
    assert await asyncio.wait_for(together(TICKETS[1]), 10) == []
    with pytest.raises(asyncio.CancelledError):
        await before
