"""From what a client wishes to how a turn is sampled."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stretto.conversation.messages import Wanted
from stretto.core.errors import RefusedRequest
from stretto.core.records import Sampling


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
        chosen = {
            field: value
            for field in ("temperature", "top_p", "top_k", "min_p")
            if (value := getattr(wanted, field)) is not None
        }
        return msgspec.structs.replace(sampling, **{**chosen, "top_k": max(0, chosen.get("top_k", sampling.top_k))})
