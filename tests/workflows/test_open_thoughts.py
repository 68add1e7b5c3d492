"""Thoughts that a prompt has begun, on their way to the reward.

Promises: a completion that ends within the thought of its prompt reaches the reward behind that thought's mark, from a
single turn and from a workflow; one that has ended its thought, and a text that a workflow has made itself, as it is.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stretto.core.records import Completion, Outcome, Prompt, Segment, StopReason, Verdict
from stretto.rollout.single_turn import judge
from stretto.rollout.workflow import WorkflowConfig
from stretto_workflows.exchange import Exchange
from stretto_workflows.wire import OrderDone, ScoreOrder, TurnOrder
from tests.workflows.benches import PROMPT, Bench, asks, encode

THINKING = msgspec.structs.replace(PROMPT, opens="<think>")
RIGHT = Verdict(Outcome.RIGHT, 1.0)


@dataclass
class Judge:
    """Keeps what it is asked about."""

    texts: list[str] = field(default_factory=list)

    async def __call__(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        self.texts += completions
        return [RIGHT for _ in completions]


def judged(prompt: Prompt, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The texts that the reward gets, and those on record."""
    judge_of_it = Judge()
    completions = [
        Completion(
            "0.17.0",
            at,
            Segment.of(token_ids=(at,), behavior_logprobs=(-0.5,), versions=(0,), stop_reason=StopReason.STOP),
        )
        for at in range(len(texts))
    ]
    made = asyncio.run(judge("0.17.0", prompt, completions, judge_of_it, lambda ids: texts[ids[0]]))
    return judge_of_it.texts, [one.text for one in made]


def test_a_single_turn_shows_the_thought_that_its_prompt_has_begun() -> None:
    texts = ["so it is 7", "so it is 7</think>7", ""]
    assert judged(PROMPT, texts) == (texts, texts)
    assert judged(THINKING, texts) == (["<think>so it is 7", "so it is 7</think>7", "<think>"], texts)


def scored(exchange: Exchange, order: TurnOrder) -> str:
    """The text of a turn, of which the reward is asked, as it is and with a word behind it."""

    async def run() -> str:
        done: OrderDone = await exchange.turn(order)
        assert done.reply is not None
        for text in (done.reply.text, f"{done.reply.text}!"):
            await exchange.score(ScoreOrder(0, 1, text, "7"))
        return done.reply.text

    return asyncio.run(run())


def test_a_workflow_shows_the_thought_in_which_a_turn_has_ended(tmp_path: Path) -> None:
    judge_of_it = Judge()
    bench = Bench(WorkflowConfig(function="tests.workflows.users_own:one"), tmp_path / "log", score=judge_of_it)
    chat = TurnOrder(0, 0, ({"role": "user", "content": "3+4="},), 0, -1, (), (), {}, "")
    for prompt, order, mark in ((PROMPT, chat, ""), (THINKING, chat, "<think>"), (THINKING, asks("3+4="), "")):
        exchange = bench.exchange(0)
        exchange = Exchange(exchange.session, prompt, exchange.task, exchange._services)
        text = scored(exchange, order)
        assert judge_of_it.texts[-2:] == [mark + text, f"{text}!"]
        bench.records.clear()
    assert encode("3+4=") == PROMPT.token_ids
