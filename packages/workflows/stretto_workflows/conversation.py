"""Base class of workflows, and the conversation by which a workflow samples from the model.

run(task, chat) ─► chat.generate() ─► a turn: sampled by an engine, or replayed from the record after a crash
                └► chat.tool(...)  ─► a call, made once
                └► chat.score(...) ─► the reward of the run
"""

from __future__ import annotations

import abc
import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from stretto.core.records import NOTHING, PROMPT
from stretto_workflows.orders import Orders
from stretto_workflows.task import ChatMessage, Reward, TurnReply, TurnScore, WorkflowTask


class Workflow(abc.ABC):
    """Base class of a user's workflow. Its method `run` converses with the model and returns the reward.

    Each worker process makes one object from the settings of the recipe. `run` is called once for each trajectory, many
    at a time, in threads. After a crash of the run or the process, `run` is called again from its beginning, and gets
    the recorded completions and tool results. So a workflow that draws its random numbers from `task.seed` continues
    where it was.

    Example::

        class Retry(stretto.Workflow):
            again = "That is wrong. Try again."

            def __init__(self, tries: int = 3) -> None:
                self.tries = tries

            def words(self) -> list[str]:
                return [self.again]

            async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
                for attempt in range(self.tries):
                    reply = await chat.generate()
                    if (await chat.score(reply.text)).right:
                        return 1.0 - 0.2 * attempt
                    chat.say(self.again)
                return 0.0

    Attributes:
        needs_chat_template: the reason why plain-text prompts do not work, to follow the workflow's name in a message;
            "" if they do. Prompts cannot be truncated then.
    """

    needs_chat_template: str = ""

    def words(self) -> Sequence[str]:
        """Fixed texts that the workflow sends to the model; by default none. A run is refused if the tokenizer cannot
        encode them."""
        return ()

    @abc.abstractmethod
    async def run(self, task: WorkflowTask, chat: Conversation) -> float | Reward:
        """Run one trajectory; returns its reward. If it raises, the trajectory fails with the exception as the
        reason."""


class _Histories:
    """Message histories of one trajectory, the newest first: the task's messages, and each that ends with a sampled
    turn. They are copies that nothing else refers to, because a workflow may edit its messages in place."""

    def __init__(self, task: WorkflowTask) -> None:
        self._known: list[tuple[list[ChatMessage], int]] = []
        if task.messages:
            self.hold(deepcopy(list(task.messages)), PROMPT)

    def hold(self, messages: list[ChatMessage], node: int) -> None:
        """Add a history that ends with the turn `node`; PROMPT: with the task's messages. `messages` is kept, not
        copied: nothing may change it later."""
        self._known.insert(0, (messages, node))

    def find(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], int]:
        """Find the longest known history that `messages` begin with; returns it with the node of its last turn (PROMPT
        for the task's messages), or ``([], NOTHING)``."""
        fits = [(known, node) for known, node in self._known if list(messages[: len(known)]) == known]
        return max(fits, key=lambda found: len(found[0]), default=([], NOTHING))


class Conversation:
    """One conversation with the model. A trajectory may have several (`new`, `copy`).

    Example::

        class Twice(stretto.Workflow):
            async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
                first = await chat.generate()
                chat.say("Are you sure?")
                second = await chat.generate(max_tokens=16)
                return float(task.answer in second.text)

    Attributes:
        messages: messages so far, which begin with the task's; a workflow may change them.
    """

    def __init__(self, orders: Orders, task: WorkflowTask) -> None:
        self.messages: list[ChatMessage] = deepcopy(list(task.messages))
        self._orders, self._task, self._histories = orders, task, _Histories(task)
        # A history that a turn has ended with, as the model was given it: `messages` may have been changed since.
        self._held, self._node, self._cause = deepcopy(self.messages), PROMPT, ""

    def say(self, text: str, role: str = "user", **further: Any) -> None:
        """Append a message, which the next `generate` includes. `further`: keys beside its role and content."""
        self.messages.append({"role": role, "content": text, **further})

    def new(self, messages: Iterable[ChatMessage] = (), cause: str = "subagent") -> Conversation:
        """Begin another conversation in the same trajectory, for another role for example. It begins with `messages`
        alone, without the task's. `cause`: reason of the branch, for the record."""
        other = self._beside(messages, cause)
        other._held, other._node = [], NOTHING
        return other

    def copy(self, cause: str = "fork") -> Conversation:
        """Copy this conversation, with its messages so far. The next turn of the copy begins a branch of the
        trajectory; `cause`: reason of the branch, for the record."""
        other = self._beside(self.messages, cause)
        other._held, other._node = self._held, self._node
        return other

    def _beside(self, messages: Iterable[ChatMessage], cause: str) -> Conversation:
        other = Conversation(self._orders, self._task)
        other.messages, other._histories, other._cause = deepcopy(list(messages)), self._histories, cause
        return other

    async def generate(
        self,
        messages: Sequence[ChatMessage] | None = None,
        *,
        token_ids: Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        cause: str = "",
    ) -> TurnReply:
        """Sample the next turn; returns it when it has ended.

        By default the turn continues the messages that this conversation has now, and is appended to them when it has
        ended. If `messages` or `token_ids` are given, the turn continues them, and this conversation does not change.
        Messages that begin with the history of an earlier turn reuse its tokens: sampled turns are not encoded again.

        Args:
            messages: the whole history before the turn.
            token_ids: the exact prompt of the turn, in place of messages.
            tools: tools that the model may call, as in Chat Completions, which the chat template describes. A turn with
                other tools than the history's begins a branch: all its messages are encoded anew.
            max_tokens: a limit below ``sampling.max_tokens``, from 1; None: that one.
            stop: further stop texts, or a single one, beside those of the recipe.
            cause: reason for a branch that begins with this turn, for the record.

        Raises:
            RefusedRequest: the history leaves no room in the model's context, a message or option is invalid, or
                `workflow.max_turns` or `workflow.max_tokens` is used up.
            TypeError: `messages`, `tools` or `token_ids` is no list of the right things.
        """
        sampling: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
        if stop:
            sampling["stop"] = [stop] if isinstance(stop, str) else list(stop)
        own = messages is None and not token_ids
        given = self.messages if messages is None else messages
        _check("messages", given, Mapping)
        _check("tools", tools, Mapping)
        _check("token_ids", token_ids, int)
        held, node = self._held, self._node
        if not own or given[: len(held)] != held:  # other messages, or they were changed
            held, node = self._histories.find(given)
        asked = [*held, *deepcopy(list(given[len(held) :]))]  # stays as it is, while `messages` may be changed
        reply = await self._orders.turn(
            () if token_ids else asked,
            len(held),
            node,
            token_ids=token_ids,
            tools=tools,
            sampling=sampling,
            cause=cause or (self._cause if own else ""),
        )
        ended = [*asked, deepcopy(reply.message)]
        if not token_ids:
            self._histories.hold(ended, reply.node)
        if own:
            self.messages.append(reply.message)
            self._held, self._node, self._cause = ended, reply.node, ""
        return reply

    async def tool(
        self,
        name: str,
        arguments: Mapping[str, Any] | Sequence[Any],
        function: Callable[..., Any],
        *,
        repeatable: bool = False,
    ) -> str:
        """Call `function`, which may be asynchronous, with the arguments (a mapping: by keyword); returns its result as
        text. A result that is not text is converted to JSON, an exception to ``"TYPE: MESSAGE"`` (SystemExit,
        KeyboardInterrupt and the trajectory's own cancellation are raised).

        The result is recorded by `name` and arguments: a trajectory that runs again after a crash gets it without a
        call. A call that the crash interrupted fails the trajectory, unless it is `repeatable` (has no side effects).

        Raises:
            RefusedRequest: the arguments or the result are longer than 64 MiB.
        """

        async def run() -> bytes:
            try:
                found = function(**arguments) if isinstance(arguments, Mapping) else function(*arguments)
                found = await found if inspect.isawaitable(found) else found
                text = found if isinstance(found, str) else json.dumps(found, default=str)
            except (SystemExit, KeyboardInterrupt):  # they end the trajectory
                raise
            except BaseException as error:  # the model gets a tool's failure as its result, a panic of Rust code too
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise  # it is not the tool's: the trajectory ends
                text = f"{type(error).__name__}: {message_of(error)}"
            return text.encode(errors="replace")

        asked = json.dumps([name, arguments], sort_keys=True, default=str).encode(errors="replace")
        return (await self._orders.call(asked, run, repeatable)).decode()

    async def score(self, text: str, answer: str | None = None) -> TurnScore:
        """Judge a text by the recipe's reward; returns the number, whose attribute `right` says whether the text counts
        as right. `answer`: gold answer to judge it against; None: the task's.

        Raises:
            RefusedRequest: the text cannot be judged. Uncaught, it fails the trajectory with the reason.
            TypeError: `text` or `answer` is not text.
        """
        answer = self._task.answer if answer is None else answer
        _check("texts that are scored", [text, answer], str)
        return await self._orders.score(text, answer)


def message_of(error: BaseException) -> str:
    """Message of an exception that user code has raised; a fixed text if its ``__str__`` raises."""
    try:
        return str(error)
    # Even an exception's own __str__ is user code.
    except BaseException:
        return "(its message cannot be shown)"


def _check(name: str, values: object, kind: type) -> None:
    """Raise TypeError unless `values` is a sequence of `kind`, and no text. `name`: for the error message."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} is {type(values).__name__}, not a list")
    if wrong := [value for value in values if not isinstance(value, kind)]:
        raise TypeError(f"{name} holds {wrong[0]!r:.80}, which is no {kind.__name__}")
