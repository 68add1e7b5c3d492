"""A completion as text, and as tokens with the numbers that a trainer needs of them."""

from __future__ import annotations

from stretto.core.records import Likeliest, Record, Segment, StopReason


class TextCompletion(Record, frozen=True):
    """What followed a prompt; `text` is without special tokens, `logprobs` are of the distribution sampled from.

    Example::

        completion = stretto.Engine.load("model").generate("3+4=", max_tokens=8)[0]
        assert len(completion.token_ids) == len(completion.logprobs)
        print(completion.text, completion.stop_reason, completion.versions)
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str  # "stop": it came to its end; "length": it was cut off
    versions: tuple[int, ...] = ()  # of the weights that sampled each token
    interrupted: int = 0  # times that weights were changed meanwhile
    top_logprobs: tuple[Likeliest, ...] = ()  # likeliest tokens at each place, where they were asked for

    @property
    def segment(self) -> Segment:
        """It as a part of a trajectory."""
        reason = StopReason(self.stop_reason)
        return Segment.of(self.token_ids, self.logprobs, self.versions, self.interrupted, reason)
