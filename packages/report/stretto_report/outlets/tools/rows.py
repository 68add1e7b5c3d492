"""Sampled completions as rows of a table."""

from __future__ import annotations

from stretto.store.series.samples import SampledCompletion

COLUMNS = ("version", "prompt", "completion", "answer", "outcome", "reward", "reason", "versions")


def row_of(sample: SampledCompletion) -> list[int | float | str | None]:
    """Cells of a completion in the order of `COLUMNS`; versions as ``6, 7``."""
    texts = (sample.prompt, sample.completion, sample.answer, sample.outcome.value)
    return [sample.version, *texts, sample.reward, sample.reason, ", ".join(map(str, sample.versions))]
