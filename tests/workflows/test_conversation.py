"""Promise: a turn continues the messages that its conversation had when it began, whatever is said, sampled or edited
meanwhile; no reply is lost, and what is sampled again behind an unchanged history reuses its tokens."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from stretto.core.forest import TurnRequest
from stretto.core.records import Prompt, Sampling, Segment, StopReason, Verdict
from stretto.rollout.workflow import WorkflowConfig
from stretto_workflows.conversation import Conversation
from stretto_workflows.exchange import Exchange, Services
from stretto_workflows.rendering import PlainRendering
from stretto_workflows.session import MemoryRecord, Session
from stretto_workflows.task import TurnReply, WorkflowTask
from stretto_workflows.wire import TurnOrder

TASK = WorkflowTask("0", "q", "a", ({"role": "user", "content": "q"},))


def encoded(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def decoded(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode()


async def unused(*_: Any) -> list[Verdict]:
    raise AssertionError("nothing is scored")


class Talk:
    """A conversation with a model that says ``<1>``, ``<2>``, ...; a turn ends when `release` is called for it."""

    def __init__(self) -> None:
        self.prompts: list[str] = []  # of the turns, in the order in which they began
        self.open: list[asyncio.Event] = []
        services = Services(
            score=unused,
            detokenize=decoded,
            plain=PlainRendering(encoded),
            template=None,
            sampling=Sampling(max_tokens=8),
            context=1 << 16,
            verdict=lambda value: pytest.fail("no verdict is needed"),
            config=WorkflowConfig(function="x", max_turns=1000),
        )
        prompt = Prompt(id="0", token_ids=encoded("q"), text="q", answer="a")
        self.session = Session("g/0", prompt.token_ids, 1, self._sample, MemoryRecord())
        self._exchange = Exchange(self.session, prompt, TASK, services)
        self.chat = Conversation(self, TASK)  # type: ignore[arg-type]  # of its orders it needs `turn` alone

    async def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        known: int,
        node: int,
        *,
        token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        cause: str,
    ) -> TurnReply:
        order = TurnOrder(1, 1, tuple(messages), known, node, tuple(token_ids), tuple(tools), sampling, cause)
        reply = (await self._exchange.turn(order)).reply
        assert reply is not None
        return reply

    async def _sample(self, request: TurnRequest) -> Segment:
        self.prompts.append(decoded(request.prompt))
        said, ended = encoded(f"<{len(self.prompts)}>"), asyncio.Event()
        self.open.append(ended)
        await ended.wait()
        return Segment.of(said, (-0.5,) * len(said), (0,) * len(said), 0, StopReason.STOP)

    @property
    def text(self) -> str:
        """What the conversation says now."""
        return "".join(message["content"] for message in self.chat.messages)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def interleaved(chance: random.Random) -> None:
    talk, turns, expected, replies, edits = Talk(), list[asyncio.Task[TurnReply]](), list[str](), 0, 0
    for step in range(40):
        match chance.choice(("say", "generate", "generate", "end", "end", "edit", "replace")):
            case "say":
                talk.chat.say(f"|say {step}|")
            case "generate":
                expected.append(talk.text)
                turns.append(asyncio.create_task(talk.chat.generate()))
            case "end" if open := [event for event in talk.open if not event.is_set()]:
                chance.choice(open).set()
                replies += 1
            case "edit":  # in place
                edited = chance.choice(talk.chat.messages)
                edits += edited["role"] == "assistant"
                edited["content"] = f"(edit {step})"  # type: ignore[index]  # it is a dict
            case "replace":
                at = chance.randrange(len(talk.chat.messages))
                edits += talk.chat.messages[at]["role"] == "assistant"
                talk.chat.messages[at] = {"role": talk.chat.messages[at]["role"], "content": f"(new {step})"}
        await settled()
        assert talk.prompts == expected
        assert sum(message["role"] == "assistant" for message in talk.chat.messages) == replies
    for event in talk.open:
        event.set()
    for number, reply in enumerate(await asyncio.gather(*turns), start=1):
        assert reply.text == f"<{number}>"
        assert edits or reply.text in talk.text


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_meanwhile_a_turn_continues_what_was_said_when_it_began(seed: int) -> None:
    asyncio.run(interleaved(random.Random(seed)))


async def test_an_unchanged_history_is_continued_by_its_tokens_and_an_edited_one_is_not() -> None:
    talk = Talk()
    for said in ("|first|", "|second|"):
        turn = asyncio.create_task(talk.chat.generate())
        await settled()
        talk.open[-1].set()
        await turn
        talk.chat.say(said)
    assert [segment.parent for segment in talk.session.forest.segments] == [-1, 0, 1]  # one line
    talk.chat.messages[1]["content"] = "(shortened)"  # type: ignore[index]  # it is a dict
    turn = asyncio.create_task(talk.chat.generate())
    await settled()
    assert talk.prompts == ["q", "q<1>|first|", "q(shortened)|first|<2>|second|"]
    talk.open[-1].set()
    await turn


def test_an_edit_of_a_copy_changes_neither_the_original_nor_the_task() -> None:
    chat = Talk().chat
    branch, other = chat.copy(), chat.new(chat.messages)
    for edited in (branch, other):
        edited.messages[0]["content"] = "(edited)"  # type: ignore[index]  # it is a dict
    assert (chat.messages[0]["content"], TASK.messages[0]["content"]) == ("q", "q")


class Told:
    """Orders whose calls are made at once, and whose turns keep how they are sampled."""

    sampling: Mapping[str, Any] = {}

    async def call(self, asked: bytes, run: Callable[[], Awaitable[bytes]], repeatable: bool) -> bytes:
        return await run()

    async def turn(self, *_: Any, sampling: Mapping[str, Any], **__: Any) -> TurnReply:
        self.sampling = sampling
        return TurnReply(0, "", {"role": "assistant", "content": ""}, (), False)


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Panic(BaseException):
    """As libraries in Rust raise it, such as tokenizers and polars."""


async def test_a_tool_s_failure_is_its_result_whatever_it_raises() -> None:
    def fails(error: BaseException) -> Callable[[], None]:
        def tool() -> None:
            raise error

        return tool

    chat = Conversation(Told(), TASK)  # type: ignore[arg-type]  # of its orders it needs these two alone
    assert await chat.tool("one", {}, fails(ValueError("no"))) == "ValueError: no"
    assert await chat.tool("two", {}, fails(Unspeakable())) == "Unspeakable: (its message cannot be shown)"
    assert await chat.tool("three", {}, fails(asyncio.CancelledError())) == "CancelledError: "
    assert await chat.tool("four", {}, fails(Panic("at 3"))) == "Panic: at 3"
    with pytest.raises(SystemExit):
        await chat.tool("five", {}, fails(SystemExit()))


async def test_a_trajectory_that_ends_takes_its_tool_along() -> None:
    chat = Conversation(Told(), TASK)  # type: ignore[arg-type]  # as above
    work = asyncio.create_task(chat.tool("waits", {}, asyncio.Event().wait))
    await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_a_single_stop_text_is_one_text_and_not_its_letters() -> None:
    told = Told()
    chat = Conversation(told, TASK)  # type: ignore[arg-type]  # as above
    await chat.generate(stop="END")
    assert told.sampling == {"stop": ["END"]}
    await chat.generate(stop=("a", "bc"))
    assert told.sampling == {"stop": ["a", "bc"]}
