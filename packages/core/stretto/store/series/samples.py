"""``samples.jsonl`` and ``held_out.jsonl``: sampled completions as text, with prompt and verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from stretto.core.records import Outcome, Prompt, Record, Verdict
from stretto.store.series.lines import keep_lines


class SampledCompletion(Record, frozen=True):
    """One judged completion. `versions`: versions that sampled its tokens. `version`: the newest of them; for a
    completion of an evaluation, the newest of the whole evaluation.

    Example: ``SampledCompletion(prompt_id="17", prompt="3+8=", answer="11", completion="3+8=11", ...)``
    """

    version: int
    prompt_id: str
    prompt: str
    answer: str  # the gold answer
    completion: str
    outcome: Outcome
    reward: float | None  # None: undecided
    reason: str
    versions: tuple[int, ...]
    rewards: Mapping[str, float] = {}  # with several rewards: the value of each, by name, before its weight

    @classmethod
    def of(cls, prompt: Prompt, versions: tuple[int, ...], text: str, verdict: Verdict) -> Self:
        versions = tuple(sorted(set(versions))) or (0,)  # sorted: with parallel turns, versions may fall
        return cls(
            version=versions[-1],
            prompt_id=prompt.id,
            prompt=prompt.text,
            answer=prompt.answer,
            completion=text,
            outcome=verdict.outcome,
            reward=verdict.reward,
            reason=verdict.reason,
            versions=versions,
            rewards=verdict.rewards,
        )


_DECODER = msgspec.json.Decoder(SampledCompletion)


def rewind_samples(path: Path, version: int) -> None:
    """Remove completions of later versions than `version`: the run is resumed there, and will sample them again. Does
    nothing without a file."""
    keep_lines(path, _DECODER, lambda sample: sample.version <= version)
