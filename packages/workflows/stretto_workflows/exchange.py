"""Conductor's side of one trajectory of a workflow: serves the requests (orders) that the worker process sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import msgspec

from stretto.core.errors import CallInterrupted, DataError, RefusedRequest, several
from stretto.core.forest import Tokens
from stretto.core.records import NOTHING, PROMPT, Outcome, Prompt, Sampling, StopReason, Trajectory, Verdict
from stretto.core.states import why_no_reward
from stretto.rollout.single_turn import Detokenize, Score
from stretto.rollout.workflow import WorkflowConfig
from stretto_verify.thoughts import with_opening
from stretto_workflows.rendering import Rendering, TemplateRendering, Tools
from stretto_workflows.session import Session
from stretto_workflows.task import TurnReply, WorkflowTask
from stretto_workflows.wire import CallOrder, MemberEnded, OrderDone, ScoreOrder, TurnOrder


@dataclass(frozen=True)
class Services:
    """The run's services for workflows: reward, renderings, limits.

    Attributes:
        score: judges texts with the recipe's reward.
        detokenize: converts token ids to text, without special tokens.
        plain: rendering for plain-text prompts.
        template: rendering for chats; None if the model has no chat template.
        sampling: the recipe's sampling settings.
        context: most tokens of a turn's prompt and completion together.
        verdict: converts a numeric reward to a verdict, with the recipe's rewards of right and wrong.
    """

    score: Score
    detokenize: Detokenize
    plain: Rendering
    template: TemplateRendering | None
    sampling: Sampling
    context: int
    verdict: Callable[[float], Verdict]
    config: WorkflowConfig


class Forged(Exception):
    """Raised for a message that a correct worker process never sends: user code in it has written the message."""


class Exchange:
    """Serves the orders (turns, scores, calls) of one trajectory. `session` samples and records, `task` is what the
    workflow is given."""

    def __init__(
        self,
        session: Session,
        prompt: Prompt,
        task: WorkflowTask,
        services: Services,
        rendering: Rendering | None = None,
    ) -> None:
        """Begin without a turn. `rendering`: rendering of the conversation if the prompt is a chat; None for a plain
        text."""
        self.session, self.task = session, task
        self._prompt, self._services = prompt, services
        self._rendering = rendering or services.plain
        self._turns = self._sampled = self._reserved = 0  # `_reserved`: tokens that turns in progress may sample
        self._turn_ended = asyncio.Event()
        self._thoughts: set[str] = set()  # texts of turns that end within a thought of the prompt
        self._told: dict[int, Tools] = {}  # tools that the tokens before the end of a turn describe, by node

    def again(self) -> Exchange:
        """Make a new exchange for the same trajectory, to run its workflow again with the recorded turns. Call it only
        when no order is in progress."""
        return Exchange(self.session.again(), self._prompt, self.task, self._services, self._rendering)

    async def turn(self, order: TurnOrder) -> OrderDone:
        """Sample one turn, or replay it from the record; returns the message with its `TurnReply`.

        Raises:
            RefusedRequest: the workflow's request is malformed or beyond a limit.
            DataError: the chat template refuses its messages, or the tokenizer cannot encode a character.
            Forged: the order continues a turn that was not sampled in this trajectory.
            EngineLost: the turn was tried on several engines, and all were lost.
            DeadlineExceeded: an engine did not finish it in time.
        """
        services, limits = self._services, self._services.config
        prompt, cause, told = self._rendered(order)
        sampling = self._sampling(order.sampling, len(prompt))
        if self._turns >= limits.max_turns:
            raise RefusedRequest("generate", f"turn {self._turns + 1}", f"workflow.max_turns is {limits.max_turns}")
        self._turns += 1
        try:
            async with self._reserves(sampling) as sampling:
                turn = await self.session.turn(prompt, sampling, order.cause or cause)
                self._sampled += turn.segment.length
        except BaseException:  # the workflow got no turn, so none counts
            self._turns -= 1
            raise
        segment, self._told[turn.node] = turn.segment, told
        text, opens = services.detokenize(segment.token_ids), "" if order.token_ids else self._prompt.opens
        if with_opening(text, opens) != text:
            self._thoughts.add(text)
        message = self._rendering.message(segment.token_ids, text, order.tools, opens)
        cut = segment.stop_reason is StopReason.LENGTH
        return OrderDone(order.run, order.order, TurnReply(turn.node, text, message, segment.token_ids, cut))

    def take_back(self, node: int) -> None:
        """Count a turn that `turn` has returned as not taken, because it did not reach the workflow."""
        self._turns -= 1
        self._sampled -= self.session.forest.segments[node].length
        self.session.take_back(node)

    def _rendered(self, order: TurnOrder) -> tuple[Tokens, str, Tools]:
        if order.token_ids:
            return order.token_ids, "", ()
        held, told = self._held(order), self._told.get(order.node, ())
        try:
            prompt = self._rendering.prompt(order.messages, order.known, held, order.tools, told)
            if self.session.earlier and self.session.waiting(prompt[0]) is None:
                prompt = next(self._earlier(order, held, told), prompt)
            return prompt
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # invalid messages of the user
            found = f"{type(error).__name__}: {error}"
            raise RefusedRequest("messages", found, 'a message is {"role": ..., "content": text}') from None

    def _earlier(self, order: TurnOrder, held: Tokens, told: Tools) -> Iterator[tuple[Tokens, str, Tools]]:
        """Yield prompts behind which an earlier version has recorded a turn that waits. It added no tools to a history
        without them, and only the first prompt had the question's arguments of the chat template."""
        plain = self._services.template if isinstance(self._rendering, TemplateRendering) else None
        for rendering, described in product((self._rendering, plain or self._rendering), (told, order.tools)):
            with suppress(DataError):  # the template may need its arguments
                prompt = rendering.prompt(order.messages, order.known, held, order.tools, described)
                if (node := self.session.waiting(prompt[0])) is not None and node < self.session.earlier:
                    yield prompt

    def _held(self, order: TurnOrder) -> Tokens:
        if order.node == NOTHING or not order.known:
            return ()
        if order.node == PROMPT:
            return self._prompt.token_ids
        segments = self.session.forest.segments
        if not 0 <= order.node < len(segments) or segments[order.node].stop_reason is None:
            raise Forged(f"continues turn {order.node}, which no engine has sampled")
        return self.session.forest.tokens(order.node)

    def _sampling(self, wanted: Any, before: int) -> Sampling:
        """Sampling options of a turn after `before` tokens: the run's, with the workflow's stop texts added.
        `max_tokens` is the least of the run's, the workflow's, and the room in the context. Raises RefusedRequest if
        the context has no room, or `wanted` is malformed."""
        sampling = self._services.sampling
        room = min(sampling.max_tokens, self._services.context - before)
        if room < 1:
            allowed = f"the model's context has {self._services.context}"
            raise RefusedRequest("messages", several(before, "token"), allowed)
        try:
            chosen = msgspec.convert(wanted, _Wanted)
        except msgspec.ValidationError as error:
            raise RefusedRequest(
                "sampling", str(error), "max_tokens is a number from 1, stop a list of texts"
            ) from None
        room = min(room, chosen.max_tokens or room)
        return msgspec.structs.replace(sampling, max_tokens=room, stop=(*sampling.stop, *chosen.stop))

    @asynccontextmanager
    async def _reserves(self, sampling: Sampling) -> AsyncIterator[Sampling]:
        """Reserve the tokens of one turn out of `workflow.max_tokens`, until the block ends. A turn that does not fit
        beside those in progress waits for them, because they may sample fewer tokens than they reserve; alone, it gets
        what is left. Raises RefusedRequest if nothing is left."""
        most = self._services.config.max_tokens
        while self._reserved and self._sampled + self._reserved + sampling.max_tokens > most:
            self._turn_ended.clear()
            await self._turn_ended.wait()  # no deadline: each turn in progress has its own
        if self._sampled >= most:
            raise RefusedRequest("generate", f"{self._sampled} tokens are sampled", f"workflow.max_tokens is {most}")
        room = min(sampling.max_tokens, most - self._sampled)
        self._reserved += room
        try:
            yield msgspec.structs.replace(sampling, max_tokens=room)
        finally:
            self._reserved -= room
            self._turn_ended.set()

    async def score(self, order: ScoreOrder) -> OrderDone:
        """Judge a text, or return the recorded reward, in the message to the worker. Rewards are recorded because a
        judge may give the same text another reward the next time.

        Raises:
            RefusedRequest: the verdict is undecided.
        """

        async def judged() -> bytes:
            text = self._prompt.opens + order.text if order.text in self._thoughts else order.text
            [verdict] = await self._services.score(self._prompt.text, [text], order.answer)
            if verdict.reward is None:
                raise RefusedRequest("score", "undecided", verdict.reason)
            return msgspec.json.encode((verdict.reward, verdict.outcome is Outcome.RIGHT))

        asked = b"score" + msgspec.json.encode([order.text, order.answer])
        reply = await self.session.call(asked, judged, repeatable=True)
        reward, right = msgspec.json.decode(reply, type=tuple[float, bool])
        return OrderDone(order.run, order.order, score=reward, right=right)

    async def call(self, order: CallOrder, run: Callable[[], Awaitable[bytes]]) -> OrderDone:
        """Make a call with `run`, which returns the encoded result, and record it, or take the recorded result; returns
        the message with it. Exceptions of `run` are raised and not recorded.

        Raises:
            CallInterrupted: the call began before a crash, and is not repeatable.
        """
        answer = await self.session.call(b"call" + order.asked, run, repeatable=order.repeatable)
        return OrderDone(order.run, order.order, answer=answer)

    def trajectory(self, ended: MemberEnded) -> Trajectory:
        """Make the trajectory from the recorded turns and the workflow's result `ended`. Its verdict is undecided, with
        the reason, if the workflow failed, its result is invalid, it sampled nothing, or a call that an earlier process
        began was interrupted."""
        session = self.session
        nodes = session.returned  # without turns that only an earlier process requested: they get no reward
        failure, rewards = ended.failure, dict[int, float]()
        try:
            session.check_calls()
        except CallInterrupted as interrupted:
            failure = failure or str(interrupted)
        for given in (ended.value or 0.0, *ended.by_turn.values(), *ended.named.values()):
            if why := why_no_reward(given):  # user code may have forged the message
                failure = failure or f"the workflow returned {why}"
        for key, reward in ended.by_turn.items():
            node = key if key >= 0 else nodes[-1 - key] if -1 - key < len(nodes) else None
            if node not in nodes:
                failure = failure or f"the workflow gives a reward to turn {node}, which was not returned to it"
            else:
                rewards[node] = reward
        segments = session.segments(rewards)
        if not failure and not segments:
            failure = "the workflow has returned without a completion"
        verdict = Verdict(Outcome.UNDECIDED, None, failure)
        if not failure and ended.value is not None:
            verdict = msgspec.structs.replace(self._services.verdict(ended.value), rewards=dict(ended.named))
        text = self._services.detokenize([token for segment in segments for token in segment.token_ids])
        return Trajectory(session.id, segments, verdict, text)


class _Wanted(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: int | None = None
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}")
