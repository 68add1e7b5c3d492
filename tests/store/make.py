"""Records, ledgers and run folders whose unimportant parts are always the same."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from stretto.core.records import (
    Batch,
    Completion,
    Group,
    Outcome,
    Prompt,
    Segment,
    StopReason,
    Trajectory,
    Update,
    Verdict,
    trajectory_id,
)
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder

PROMPT = Prompt(id="17", token_ids=(5, 12, 8, 13), text="3+8=", answer="11")
RIGHT, WRONG = Verdict(outcome=Outcome.RIGHT, reward=1.0), Verdict(outcome=Outcome.WRONG, reward=0.0)


def spelled(ids: Sequence[int]) -> str:
    """Text of token ids, packed or not, for what needs a detokenizer."""
    return str(tuple(ids))


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(at), token_ids=(at,), text=f"{at}?", answer=str(at)) for at in range(count)]


def sampled(
    versions: Sequence[int] = (0, 0),
    tokens: Sequence[int] | None = None,
    stop: StopReason | None = StopReason.STOP,
    **further: Any,
) -> Segment:
    """Tokens 4, 5, ... with the log-probabilities -0.25, -0.5, ..., unless others are given."""
    ids = range(4, 4 + len(versions)) if tokens is None else tokens
    logprobs = [-0.25 * (at + 1) for at in range(len(ids))]
    given: dict[str, Any] = {"token_ids": ids, "behavior_logprobs": logprobs, "versions": versions, "stop_reason": stop}
    return Segment.of(**(given | further))


def completion(request: str, member: int = 0, versions: Sequence[int] = (0, 0), **further: Any) -> Completion:
    return Completion(request, member, sampled(versions, **further))


def verdict(reward: float | None, above: float = 0.0) -> Verdict:
    """Right above a reward; None is undecided."""
    if reward is None:
        return Verdict(outcome=Outcome.UNDECIDED, reward=None, reason="timeout")
    return Verdict(outcome=Outcome.RIGHT if reward > above else Outcome.WRONG, reward=reward)


def judged(id: str, reward: float | None = 1.0, versions: Sequence[int] = (0,), **further: Any) -> Trajectory:
    """A single turn."""
    return Trajectory(id=id, segments=(sampled(versions, **further),), verdict=verdict(reward), text="")


class Make:
    """Builds records whose unimportant parts are always the same."""

    prompt = PROMPT

    @staticmethod
    def trajectory(group: str, member: int = 0, versions: Sequence[int] = (0, 0), right: bool = True) -> Trajectory:
        segment = sampled(versions, interrupted=len(set(versions)) - 1 if versions else 0)
        return Trajectory(trajectory_id(group, member), (segment,), RIGHT if right else WRONG, "11")

    @staticmethod
    def group(name: str, *trajectories: Trajectory, admitted_version: int = 0) -> Group:
        return Group(id=name, prompt=PROMPT, admitted_version=admitted_version, trajectories=trajectories)

    @staticmethod
    def batch(step: int, *groups: Group, version: int | None = None, oldest_trainable: int = 0) -> Batch:
        at = step - 1 if version is None else version
        return Batch(step=step, version=at, groups=groups, oldest_trainable=oldest_trainable)

    @staticmethod
    def update(step: int, trained_tokens: int = 4) -> Update:
        return Update(step=step, version=step, trained_tokens=trained_tokens, masked_tokens=0, metrics={"loss": 0.5})


@contextmanager
def ledger_at(path: Path, **settings: Any) -> Iterator[Ledger]:
    """The ledger of this file; closed at the end."""
    with closing(Ledger(path, StoreConfig.model_validate(settings))) as ledger:
        yield ledger


@contextmanager
def run_at(path: Path) -> Iterator[tuple[RunFolder, Ledger]]:
    """A new run folder and its ledger."""
    with RunFolder.create(path) as folder, ledger_at(folder.ledger) as ledger:
        yield folder, ledger


def buffered(ledger: Ledger, *groups: Group) -> None:
    """Issue the groups, and put them into the buffer."""
    for group in groups:
        ledger.issue(group.id, group.prompt, len(group.trajectories), group.admitted_version)
        ledger.buffer(group)


def trained(ledger: Ledger, batch: Batch, tokens: int = 4) -> None:
    """Train a batch of groups that nobody has issued yet."""
    buffered(ledger, *batch.groups)
    ledger.commit_batch(batch)
    ledger.record_update(Make.update(batch.step, tokens))


def sql(path: Path, statement: str, *parameters: object) -> list[tuple[Any, ...]]:
    """The rows of a statement; of several, which stand between semicolons, nothing."""
    with closing(sqlite3.connect(path)) as connection:
        if ";" in statement:
            connection.executescript(statement)
            return []
        found = connection.execute(statement, parameters).fetchall()
        connection.commit()
        return found
