"""From a batch of groups to rows that can be trained on: one row per answer, with everything known about its tokens.

A row is prompt + answer. Its loss tokens are the answer's tokens that are young enough to be trained on
(``Batch.oldest_trainable``); the others stay in the row as context. An answer without loss tokens makes no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from stretto.core.errors import BoundViolated
from stretto.core.records import Batch, Completion, Prompt
from stretto.trainer.advantages import advantages
from stretto.trainer.config import AlgorithmConfig


@dataclass(frozen=True)
class Row:
    """Example: prompt (5, 12), answer (4, 4, 2) of versions (5, 6, 7), trained at 7 with versions from 6 on::

    Row(token_ids=(5, 12, 4, 4, 2), prompt_tokens=2, loss_positions=(3, 4),
        behavior_logprobs=(-0.7, -0.02), on_policy=(False, True), advantage=0.5)
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    loss_positions: tuple[int, ...]  # [N], ascending, each at least 1
    behavior_logprobs: tuple[float, ...]  # [N]
    on_policy: tuple[bool, ...]  # [N], sampled by the very version that is being trained
    advantage: float


@dataclass(frozen=True)
class Rows:
    """A batch as the trainer sees it."""

    rows: tuple[Row, ...]
    masked_tokens: int  # answer tokens too old to be trained on
    reward_mean: float  # over all trajectories of the batch


def rows_of(batch: Batch, config: AlgorithmConfig) -> Rows:
    """Advantages over the whole batch, then one row for each answer that has loss tokens.

    Raises:
        BoundViolated: a token has no log-probability or version, or was sampled by a version not published yet.
    """
    answers = [[(group.prompt, t.completion) for t in group.trajectories] for group in batch.groups]
    rewards = [[t.reward for t in group.trajectories] for group in batch.groups]
    trained = [[_trainable(completion, batch) for _, completion in group] for group in answers]
    scores = advantages(config, rewards, [[len(inside) for inside in group] for group in trained])
    rows = [
        _row(*answer, inside, score, batch.version)
        for group in zip(answers, trained, scores, strict=True)
        for answer, inside, score in zip(*group, strict=True)
        if inside
    ]
    flat = [reward for group in rewards for reward in group]
    tokens = sum(len(completion.token_ids) for group in answers for _, completion in group)
    return Rows(
        rows=tuple(rows),
        masked_tokens=tokens - sum(len(row.loss_positions) for row in rows),
        reward_mean=sum(flat) / len(flat) if flat else 0.0,
    )


def _trainable(completion: Completion, batch: Batch) -> tuple[int, ...]:
    """Positions within the answer whose tokens may be trained on."""
    versions, tokens = completion.versions, len(completion.token_ids)
    if not tokens == len(versions) == len(completion.behavior_logprobs):
        raise BoundViolated(f"answer {completion.request}/{completion.member}: a token lacks its version or log-prob")
    if versions and max(versions) > batch.version:
        raise BoundViolated(
            f"answer {completion.request}/{completion.member} has tokens of version {max(versions)}, "
            f"but version {batch.version} is being trained"
        )
    if not versions or min(versions) >= batch.oldest_trainable:
        return tuple(range(tokens))
    return tuple(t for t, version in enumerate(versions) if version >= batch.oldest_trainable)


def _row(prompt: Prompt, completion: Completion, inside: tuple[int, ...], advantage: float, version: int) -> Row:
    start = len(prompt.token_ids)
    return Row(
        token_ids=prompt.token_ids + completion.token_ids,
        prompt_tokens=start,
        loss_positions=tuple(start + t for t in inside),
        behavior_logprobs=tuple(completion.behavior_logprobs[t] for t in inside),
        on_policy=tuple(completion.versions[t] == version for t in inside),
        advantage=advantage,
    )
