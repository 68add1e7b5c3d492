"""Law of the goodput budget: every token has one category, and the budget agrees with the batches of the ledger."""

from __future__ import annotations

from collections.abc import Iterator

from stretto_report.audit.history import History


def every_token_has_one_category(history: History) -> Iterator[str]:
    """After each step, the trained and masked tokens of the budget equal the sums over all batches so far, and no
    category is negative. The budget's sampled tokens are at least those that engines had counted. (A killed engine may
    have counted fewer than it sampled.)"""
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
