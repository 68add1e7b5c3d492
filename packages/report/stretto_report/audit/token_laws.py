"""Laws of tokens (see `laws`): the category of each in the goodput budget; the parents, versions and training of
segments.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto_report.audit.history import NOTHING, PROMPT, History, RecordedTrajectory


def every_token_has_one_category(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The trained and masked tokens of the budget after each step equal the
    sums over all batches so far, and no category is negative. The budget's sampled tokens are at least those that
    engines had counted. (A killed engine may have counted fewer than it sampled.) A step without a budget in
    ``metrics.jsonl`` is not checked."""
    trained = masked = 0
    for step in history.steps:
        trained, masked = trained + step.trained_tokens, masked + step.masked_tokens
        line = history.lines.get(step.step)
        if line is None or not line.budget:
            continue
        found = line.budget.get("trained"), line.budget.get("masked")
        if found != (trained, masked):
            told = f"{found[0]} tokens trained and {found[1]} masked"
            yield f"step {step.step}: the budget has {told}, the batches so far have {trained} and {masked}"
        yield from (
            f"step {step.step}: the budget has {tokens} tokens {name}"
            for name, tokens in line.budget.items()
            if tokens < 0
        )
        if (sampled := sum(line.budget.values()) - line.budget.get("recomputed", 0)) < line.generated:
            yield f"step {step.step}: the budget has {sampled} sampled tokens, engines had counted {line.generated}"


def every_segment_has_its_place(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The parent of each segment is an earlier segment, the prompt or, for a
    given (not sampled) segment, nothing. A sampled segment has one log-probability and one version for each token; a
    given segment has none."""
    for one in history.trajectories:
        for place, segment in enumerate(one.segments or ()):
            if not NOTHING <= segment.parent < place:
                yield f"{one.id}: segment {place} is behind segment {segment.parent}"
            elif segment.parent == NOTHING and segment.stamps:
                yield f"{one.id}: segment {place} was sampled behind nothing"
            if not segment.logprobs == segment.stamped in (0, segment.tokens):
                found = f"{segment.logprobs} log-probabilities and {segment.stamped} versions"
                yield f"{one.id}: segment {place} has {segment.tokens} tokens, {found}"


def backward_versions(one: RecordedTrajectory) -> Iterator[tuple[int, ...]]:
    """Yield the versions of each sampled segment in which a version is lower than one before it, each once for the
    tokens in a row that have it. Each tuple begins with the last version sampled before the segment, on its path from
    the root, if any."""
    last: list[tuple[int, ...]] = []  # version of the last sampled token from the root to the end of each segment
    for segment in one.segments or ():
        before = last[segment.parent] if PROMPT < segment.parent < len(last) else ()
        chain = before + tuple(version for version, _ in segment.stamps)
        if segment.stamps and list(chain) != sorted(chain):
            yield chain
        last.append(chain[-1:])


def every_sampled_token_is_trained_once(history: History) -> Iterator[str]:
    """Law, yielding a sentence for each breach: The trainer reports, in each step, as many trained and as many masked
    tokens as the batch has. A step without a line in ``metrics.jsonl`` is not checked."""
    for step in history.steps:
        line = history.lines.get(step.step)
        if line is not None and (line.trained, line.masked) != (step.trained_tokens, step.masked_tokens):
            told = f"{line.trained} tokens and masked {line.masked}"
            yield f"step {step.step} trained on {told}, its batch has {step.trained_tokens} and {step.masked_tokens}"
