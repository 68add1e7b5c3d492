"""From what a client wishes to how a turn is sampled."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stretto.conversation.messages import AskedTurn, Wanted
from stretto.core.errors import RefusedRequest
from stretto.core.records import Sampling

_CHOSEN = ("temperature", "top_p", "top_k", "min_p")


@dataclass(frozen=True)
class SamplingRule:
    """How the turns of a session are sampled.

    Attributes:
        default: where a client wishes nothing; `max_tokens` is the most of one turn.
        context: most tokens of prompt and completion.
        fixed: clients choose lengths and stop texts only, as the policy that is trained samples by one distribution.
    """

    default: Sampling
    context: int
    fixed: bool = False

    def check(self, asked: AskedTurn) -> None:
        """
        Raises:
            RefusedRequest: it wants a call of a tool that it does not offer.
        """
        choice, offered = asked.wanted.tool_choice, [tool.name for tool in asked.tools]
        if choice not in ("auto", "none") and (choice not in offered if choice != "required" else not offered):
            allowed = f"one of the tools that the request offers: {', '.join(offered)[:400] or 'none'}"
            raise RefusedRequest("tool_choice", repr(choice[:80]), allowed)

    def unapplied(self, asked: AskedTurn) -> tuple[str, ...]:
        """The wishes of the request that change nothing of what is sampled, by the names of Chat Completions: tokens
        are those of the policy, which no grammar constrains."""
        wanted = asked.wanted
        wishes = {
            "tool_choice": wanted.tool_choice not in ("auto", "none"),
            "parallel_tool_calls": bool(asked.tools) and not wanted.parallel_calls,
            "strict": any(tool.strict for tool in asked.tools),
            "response_format": wanted.json,
            "seed": wanted.seed is not None,
        }
        for name in _CHOSEN if self.fixed else ():
            wishes[name] = getattr(wanted, name) not in (None, getattr(self.default, name))
        return tuple(name for name, unapplied in wishes.items() if unapplied)

    def sampling(self, wanted: Wanted, prompt_tokens: int) -> Sampling:
        """
        Raises:
            RefusedRequest: the context has no room behind the prompt.
        """
        left = self.context - prompt_tokens
        if left < 1:
            allowed = f"at most {self.context - 1:,}, so that the context has room for a completion"
            raise RefusedRequest("messages", f"{prompt_tokens:,} tokens", allowed)
        most = min(left, self.default.max_tokens, wanted.max_tokens or left)
        sampling = msgspec.structs.replace(self.default, max_tokens=most, stop=self.default.stop + wanted.stop)
        if self.fixed:
            return sampling
        chosen = {field: value for field in _CHOSEN if (value := getattr(wanted, field)) is not None}
        return msgspec.structs.replace(sampling, **{**chosen, "top_k": max(0, chosen.get("top_k", sampling.top_k))})
