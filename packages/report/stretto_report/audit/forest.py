"""Laws of segments: their parents, the order of their versions, their training."""

from __future__ import annotations

from collections.abc import Iterator

from stretto_report.audit.history import NOTHING, PROMPT, History, RecordedTrajectory


def every_segment_has_its_place(history: History) -> Iterator[str]:
    """The parent of each segment is an earlier segment, the prompt or, for a given (not sampled) segment, nothing. A
    sampled segment has one log-probability and one version for each token; a given segment has none."""
    for one in history.trajectories:
        for place, segment in enumerate(one.segments):
            if not NOTHING <= segment.parent < place:
                yield f"{one.id}: segment {place} is behind segment {segment.parent}"
            elif segment.parent == NOTHING and segment.versions:
                yield f"{one.id}: segment {place} was sampled behind nothing"
            if not segment.logprobs == len(segment.versions) in (0, segment.tokens):
                found = f"{segment.logprobs} log-probabilities and {len(segment.versions)} versions"
                yield f"{one.id}: segment {place} has {segment.tokens} tokens, {found}"


def backward_versions(one: RecordedTrajectory) -> Iterator[tuple[int, ...]]:
    """Sequences of versions that decrease. Each is a sampled segment's versions, preceded by the last version that was
    sampled before it on its path."""
    last: list[tuple[int, ...]] = []  # version of the last sampled token from the root to the end of each segment
    for segment in one.segments:
        before = last[segment.parent] if PROMPT < segment.parent < len(last) else ()
        chain = before + segment.versions
        if segment.versions and list(chain) != sorted(chain):
            yield chain
        last.append(chain[-1:])


def every_sampled_token_is_trained_once(history: History) -> Iterator[str]:
    """In each step, the trainer reports as many trained and as many masked tokens as the batch has."""
    for step in history.steps:
        line = history.lines.get(step.step)
        if line is not None and (line.trained, line.masked) != (step.trained_tokens, step.masked_tokens):
            told = f"{line.trained} tokens and masked {line.masked}"
            yield f"step {step.step} trained on {told}, its batch has {step.trained_tokens} and {step.masked_tokens}"
