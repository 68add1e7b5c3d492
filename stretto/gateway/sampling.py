"""From what a client wishes to how a turn is sampled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stretto.conversation.messages import AskedTurn, Wanted
from stretto.conversation.tool_calls import CallForm
from stretto.core.engine import json_rule
from stretto.core.errors import RefusedRequest
from stretto.core.records import Sampling

#: What a client may choose of the distribution.
DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class CallForms:
    """The grammars of turns, for one model: `form` is how it writes calls, `vocabulary` has its tokens."""

    form: CallForm
    vocabulary: Mapping[str, int]

    def grammar(self, asked: AskedTurn) -> str:
        """What a turn has to follow; empty where the request leaves it free. The text of a turn that may call tools
        follows the schema unless it does call one.

        Raises:
            RefusedRequest: a schema cannot be written.
        """
        wanted = asked.wanted
        named = [tool for tool in asked.tools if wanted.tool_choice in (tool.name, "required", "auto")]
        parallel = wanted.parallel_calls and wanted.tool_choice in ("required", "auto")
        text = f"text: {json_rule(wanted.schema)}\n" if wanted.json else ""
        if _forced(wanted):
            return f"start: calls\n{self.form.rules(named, self._word, parallel=parallel)}"
        if not text or not named:
            return text and f"start: text\n{text}"
        return f"start: text | calls\n{text}{self.form.rules(named, self._word, parallel=parallel)}"

    def _word(self, text: str) -> str:
        """As its token, where it is one."""
        return f"<[{self.vocabulary[text]}]>" if text in self.vocabulary else json.dumps(text)


def _forced(wanted: Wanted) -> bool:
    """Whether a tool has to be called."""
    return wanted.tool_choice not in ("auto", "none")


@dataclass(frozen=True)
class SamplingRule:
    """How the turns of a session are sampled.

    Attributes:
        default: where a client wishes nothing; `max_tokens` is the most of one turn.
        context: most tokens of prompt and completion.
        chosen: the fields of the distribution that clients choose, beside lengths and stop texts; none in a run, as the
            policy that is trained samples by one distribution.
        forms: how the model writes calls, where the engine follows grammars; None where it follows none.
    """

    default: Sampling
    context: int
    chosen: tuple[str, ...] = DISTRIBUTION
    forms: CallForms | None = None

    def check(self, asked: AskedTurn) -> None:
        """
        Raises:
            RefusedRequest: it wants a call of a tool that it does not offer.
        """
        choice, offered = asked.wanted.tool_choice, [tool.name for tool in asked.tools]
        if _forced(asked.wanted) and (choice not in offered if choice != "required" else not offered):
            allowed = f"one of the tools that the request offers: {', '.join(offered)[:400] or 'none'}"
            raise RefusedRequest("tool_choice", repr(choice[:80]), allowed)

    def unapplied(self, asked: AskedTurn) -> tuple[str, ...]:
        """The wishes of the request that change nothing of what is sampled, by the names of Chat Completions."""
        wanted, followed = asked.wanted, self.forms is not None
        forced = followed and bool(asked.tools) and _forced(wanted)
        wishes = {
            "tool_choice": _forced(wanted) and not followed,
            "parallel_tool_calls": bool(asked.tools) and not wanted.parallel_calls and not forced,
            "strict": any(tool.strict for tool in asked.tools) and not forced,
            "response_format": wanted.json and not followed,
            "seed": wanted.seed is not None,
        }
        for name in DISTRIBUTION:
            other = getattr(wanted, name) not in (None, getattr(self.default, name))
            wishes[name] = other and name not in self.chosen
        return tuple(name for name, unapplied in wishes.items() if unapplied)

    def sampling(self, asked: AskedTurn, prompt_tokens: int) -> Sampling:
        """
        Raises:
            RefusedRequest: the context has no room behind the prompt, or a schema cannot be written as a grammar.
        """
        wanted = asked.wanted
        left = self.context - prompt_tokens
        if left < 1:
            allowed = f"at most {self.context - 1:,}, so that the context has room for a completion"
            raise RefusedRequest("messages", f"{prompt_tokens:,} tokens", allowed)
        most = min(left, self.default.max_tokens, wanted.max_tokens or left)
        grammar = self.forms.grammar(asked) if self.forms is not None else ""
        stop = self.default.stop + wanted.stop
        sampling = msgspec.structs.replace(self.default, max_tokens=most, stop=stop, grammar=grammar)
        chosen = {field: value for field in self.chosen if (value := getattr(wanted, field)) is not None}
        if "top_k" in chosen:
            chosen["top_k"] = max(0, chosen["top_k"])  # -1 is none
        return msgspec.structs.replace(sampling, **chosen)
