"""`stretto.Datum`: one sequence to train on, with a target and further numbers for each position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Self

import numpy as np

from stretto.core.errors import DataError, Problem
from stretto.core.records import Batch
from stretto.doors.mistakes import shown
from stretto.trainer.batch.samples import Sample
from stretto_verbs.arguments import plain
from stretto_verbs.completion import LARGEST_LOGPROB, mark_on

_MOST_LAG = 1 << 31

#: A number for each of the T positions, or a row of K numbers: one for each target of the position.
Targets = tuple[int, ...] | tuple[tuple[int, ...], ...]
Factors = tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Datum:
    """One sequence to train on: the tokens that the model reads, and the target token that should follow each.

    A position with weight 0 does not count in the loss. Empty `weights` are all 1, an empty `staleness` (in versions)
    is 0. For distillation, each position may have K targets (the teacher's most likely tokens): then targets and
    weights are rows of K, and the loss must be "cross_entropy" or a function.

    Example::

        # The completion (4, 2) of the prompt (5, 12), and a completion that was sampled.
        told = stretto.Datum.of((5, 12), (4, 2))
        assert told.targets == (12, 4, 2) and told.weights == (0, 1, 1)
        sampled = stretto.Datum.of((5, 12), (4, 2), logprobs=(-0.7, -0.1), advantages=0.5)
        soft = stretto.Datum((5, 12), targets=((12, 4), (4, 2)), weights=((0, 0), (0.9, 0.1)))
    """

    token_ids: tuple[int, ...]  # [T]
    targets: Targets  # [T] or [T, K]
    weights: Factors = ()  # shape of `targets`; empty: all 1
    logprobs: tuple[float, ...] = ()  # [T], under the policy that sampled the targets; empty: not known
    advantages: tuple[float, ...] = ()  # [T]; empty: none
    staleness: tuple[int, ...] = ()  # [T], versions between sampling and training; empty: all 0

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        weight: float = 1.0,
        logprobs: Sequence[float] = (),
        advantages: float | Sequence[float] | None = None,
    ) -> Self:
        """Make the datum of a prompt and its completion; the prompt's positions have weight 0.

        Args:
            prompt, completion: token ids.
            weight: of each token of the completion.
            logprobs: of the completion's tokens, under the policy that sampled them.
            advantages: of the completion's tokens; a number: the same for all; None: none.

        Raises:
            DataError: the prompt is empty, or a text is given.
        """
        for name, part in (("prompt", prompt), ("completion", completion)):
            if isinstance(part, str):
                raise DataError([Problem(f"Datum.of: {name}", f"the text {part!r:.40}", "token ids, by the tokenizer")])
        prompt, completion, logprobs = plain(prompt), plain(completion), plain(logprobs)
        if not len(prompt):
            remedy = "give at least one token: the first token cannot be predicted"
            raise DataError([Problem("Datum.of: prompt", "0 tokens", remedy)])
        before = len(prompt) - 1
        whole = (*prompt, *completion)
        given = plain(advantages)
        if isinstance(given, Real):
            given = [float(given)] * len(completion)
        return cls(
            token_ids=tuple(whole[:-1]),
            targets=tuple(whole[1:]),
            weights=(0.0,) * before + (float(weight),) * len(completion),
            logprobs=(0.0,) * before + tuple(logprobs) if logprobs else (),
            advantages=(0.0,) * before + tuple(map(float, given)) if given is not None else (),
        )

    @property
    def trained(self) -> list[int]:
        """Indices of the positions that count in the loss (with a weight other than 0)."""
        return [at for at in range(len(self.token_ids)) if not self.weights or any(_row(self.weights[at]))]

    @property
    def width(self) -> int:
        """Number of targets of each position."""
        return len(_row(self.targets[0])) if self.targets else 1


#: Training data: a batch of groups with rewards, or sequences with their own weights and advantages.
Data = Batch | Sequence[Datum]


@dataclass(frozen=True)
class Forward:
    """Result of `Trainer.forward` and `forward_backward`: log-probabilities under the policy before the step, the loss
    (NaN for `forward`), and metrics (docs/reference/metrics.md). `forward` gives no metrics. `ids`: of the sequences,
    in the order of `logprobs`.

    Example::

        found = stretto.Trainer("model").forward([stretto.Datum.of((2, 3, 4), (5, 1))])
        assert len(found.logprobs[0]) == 4  # of each target: 3, 4, 5, 1
    """

    # For a datum: one number per target, position by position. For a batch: one per loss token of each path; after a
    # loss that is a function, one per position of each path, prompt included, as the function gets them.
    logprobs: tuple[tuple[float, ...], ...]
    loss: float = math.nan
    metrics: Mapping[str, float] = field(default_factory=dict)
    ids: tuple[str, ...] = field(default=(), repr=False)  # of the sequences: place in a list, or path of a trajectory


def listed(data: Any, place: str) -> Data:
    """Return a batch unchanged, and any other iterable of data as a tuple, which can be read several times. `place`:
    name of the called method, for messages. Raises DataError if there is no datum, or `data` is not iterable."""
    if isinstance(data, Batch):
        return data
    if data is None:
        remedy = "`Scheduler.take` has no batch yet: call it again later, or wait for `await scheduler.batch()`"
        raise DataError([Problem(f"{place}: data", "None", remedy)])
    if isinstance(data, Datum) or not isinstance(data, Iterable):
        raise DataError([Problem(f"{place}: data", f"a {type(data).__name__}", "give a list of stretto.Datum")])
    if not (found := tuple(data)):
        raise DataError([Problem(f"{place}: data", "there is none", "give a list of stretto.Datum")])
    return found


def sample_of(datum: Datum, number: int, *, sampled: bool, longest: int | None = None) -> Sample:
    """Convert a datum, which `check_data` has accepted, to the trainer's `Sample` with `number` as its id.

    Args:
        sampled: take over log-probabilities and advantages, which the datum must have (`check_sampled`); otherwise all
            advantages are 1, without log-probabilities.
        longest: length in tokens at which the sample is cut off: the model's context, if its positions are learned.
            None: it is not cut off.
    """
    trained, width = datum.trained, datum.width
    tokens = (*datum.token_ids, _row(datum.targets[-1])[-1])[:longest]
    as_read = width == 1 and (*datum.token_ids[:1], *datum.targets) == tokens
    return Sample(
        id=str(number),
        token_ids=tokens,
        prompt_tokens=0,
        loss_positions=np.repeat(np.asarray(trained, np.int64) + 1, width),
        behavior_logprobs=tuple(datum.logprobs[at] for at in trained) if sampled else (),
        staleness=tuple(datum.staleness[at] if datum.staleness else 0 for at in trained for _ in range(width)),
        advantages=tuple(datum.advantages[at] for at in trained) if sampled else (1.0,) * len(trained) * width,
        weights=_flat(datum.weights[at] for at in trained) if datum.weights else (1.0,) * len(trained) * width,
        scored=np.repeat(np.arange(1, len(datum.token_ids) + 1), width),
        targets=() if as_read else _flat(datum.targets),
    )


def datum_of(sample: Sample) -> Datum:
    """Convert a sample of a batch to a datum of all its tokens. Positions of loss tokens have weight 1, and the
    sample's log-probabilities, advantages and staleness; all other positions have zeros."""
    positions, at = len(sample.token_ids) - 1, np.asarray(sample.loss_positions) - 1

    def spread(values: Sequence[float] | np.ndarray[Any, Any], kind: type) -> tuple[Any, ...]:
        column: np.ndarray[Any, Any] = np.zeros(positions, kind)
        column[at] = values
        return tuple(column.tolist())

    tokens = tuple(np.asarray(sample.token_ids).tolist())
    return Datum(
        token_ids=tokens[:-1],
        targets=tokens[1:],
        weights=spread(np.ones(len(at)), np.float64),
        logprobs=spread(sample.behavior_logprobs, np.float64),
        advantages=spread(sample.advantages, np.float64),
        staleness=spread(sample.staleness, np.int64),
    )


def _row(value: Any) -> Sequence[Any]:
    """Return the numbers of one position as a sequence."""
    return value if isinstance(value, Sequence) else (value,)


def _flat(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the numbers of all positions, one after the other."""
    return tuple(number for value in values for number in _row(value))


def rewards_of(data: Data) -> dict[str, float]:
    """Return the mean reward of a batch as the metric `reward_mean`; an empty dict for a list of data."""
    groups = data.groups if isinstance(data, Batch) else ()
    rewards = [trajectory.reward for group in groups for trajectory in group.trajectories]
    return {"reward_mean": sum(rewards) / len(rewards)} if rewards else {}


def check_data(data: Sequence[Datum], vocabulary: int, longest: int, place: str) -> None:
    """Check that tokens, lengths and shapes of the data are valid for the model.

    Args:
        vocabulary: number of the model's tokens.
        longest: the model's context length in tokens.
        place: name of the called method, for messages.

    Raises:
        DataError: names every mistake in every datum.
    """
    problems = [problem for at, one in enumerate(data) for problem in _problems(one, vocabulary, longest, at, place)]
    if problems:
        raise DataError(problems)


def check_sampled(data: Sequence[Datum], loss: str, place: str) -> None:
    """Check that the data have log-probabilities, advantages and one target per position, as a loss over sampled tokens
    needs, and that the tokens in the loss have possible log-probabilities. `loss`: its name, for messages. Raises
    DataError, which names every datum that lacks something, or has an impossible number."""
    needed = {"logprobs": "those that the engine gave with the tokens", "advantages": "a number for each token"}
    problems = [
        Problem(f"{place}: data[{at}].{name}", "is missing", f'the loss "{loss}" needs it: {what}')
        for at, one in enumerate(data)
        for name, what in needed.items()
        if not getattr(one, name)
    ]
    problems += [
        Problem(f"{place}: data[{at}].targets", f"{one.width} for each position", f'the loss "{loss}" knows one')
        for at, one in enumerate(data)
        if one.width != 1
    ]
    for at, one in enumerate(data):
        if odd := [one.logprobs[n] for n in one.trained if one.logprobs and one.logprobs[n] > LARGEST_LOGPROB]:
            remedy = "give a logarithm of a probability, at most 0"
            problems.append(Problem(f"{place}: data[{at}].logprobs", f"{odd[0]}", remedy))
    if problems:
        raise DataError(problems)


def check_batch(batch: Batch, version: int, vocabulary: int, mark: str, place: str) -> None:
    """Check that a trainer can train on a batch: its versions, tokenizer, token ids, and one log-probability per
    sampled token.

    Args:
        version: the trainer's version; the batch must not be of a later one.
        vocabulary: number of the model's tokens.
        mark: mark of the trainer's tokenizer, which must be that of the batch; not checked if it is "" (not known) or
            the batch has none.
        place: name of the called method, for messages.

    Raises:
        DataError: names every mistake.
    """
    problems = list[Problem]()
    if mark not in ("", mark_on(batch)) and mark_on(batch):
        told = "its tokens are of another tokenizer than this trainer's model"
        problems.append(Problem(f"{place}: batch", told, "engine, scheduler and trainer begin with one model folder"))
    if batch.version > version:
        told = f"is for version {batch.version}, and this trainer is at version {version}"
        problems.append(Problem(f"{place}: batch", told, "load the checkpoint of that version first"))
    for group in batch.groups:
        tokens = [*group.prompt.token_ids]
        for trajectory in group.trajectories:
            tokens += trajectory.token_ids
            where = f"{place}: trajectory {trajectory.id}"
            if (newest := max(trajectory.versions, default=0)) > version:
                told = f"was sampled by version {newest}, and this trainer is at version {version}"
                problems.append(Problem(where, told, "give it to the trainer whose weights the engine has"))
            if len(trajectory.behavior_logprobs) != len(trajectory.versions):
                problems.append(Problem(where, "lacks log-probabilities", "keep those that the engine gave"))
        if outside := [token for token in tokens if not 0 <= token < vocabulary]:
            told = f"token {outside[0]} is not in this model's vocabulary of {vocabulary} tokens"
            remedy = "encode prompts by its tokenizer"
            problems.append(Problem(f"{place}: group {group.id}", told, remedy))
    if problems:
        raise DataError(problems)


def _problems(one: object, vocabulary: int, longest: int, number: int, place: str) -> list[Problem]:
    """List the mistakes in `one`, datum number `number`; only one, if it is no `Datum`. `vocabulary`: number of the
    model's tokens; `longest`: its context length; `place`: name of the called method, for messages."""
    where, found = f"{place}: data[{number}]", list[Problem]()
    if not isinstance(one, Datum):
        return [Problem(where, f"is a {type(one).__name__}", "give a stretto.Datum")]
    tokens = len(one.token_ids)
    if not 1 <= tokens <= longest:
        found.append(Problem(f"{where}.token_ids", f"{tokens} tokens", f"1 to {longest}, the context of the model"))
    for name in ("token_ids", "targets"):
        values = _flat(getattr(one, name)) if name == "targets" else one.token_ids
        if outside := [token for token in values if not _is_token(token, vocabulary)]:
            told = f"token {shown(outside[0])} is not in this model's vocabulary"
            remedy = f"tokens are 0 to {vocabulary - 1}: encode by the tokenizer of the model that is trained"
            found.append(Problem(f"{where}.{name}", told, remedy))
    for name in ("targets", "weights", "logprobs", "advantages", "staleness"):
        values = getattr(one, name)
        if len(values) != tokens and (values or name == "targets"):
            found.append(Problem(f"{where}.{name}", f"{len(values)} values", f"{tokens} are needed, one a token"))
    for name in ("targets", "weights"):
        if odd := [value for value in getattr(one, name) if not _is_wide(value, one)]:
            told = shown(odd[0])
            found.append(Problem(f"{where}.{name}", told, "a number for each position, or for each a row of K of them"))
    for name in ("weights", "logprobs", "advantages"):
        if wrong := [value for value in _flat(getattr(one, name)) if not _is_finite(value)]:
            found.append(Problem(f"{where}.{name}", shown(wrong[0]), "finite numbers are needed"))
    if wrong := [value for value in one.staleness if not _is_token(value, _MOST_LAG)]:
        told = f"numbers of versions, 0 to {_MOST_LAG - 1:,}, are needed"
        found.append(Problem(f"{where}.staleness", shown(wrong[0]), told))
    return found


def _is_wide(value: object, datum: Datum) -> bool:
    """Whether `value` has the shape of the datum's first target: a number, or a row with the same number of numbers."""
    first = datum.targets[0] if datum.targets else 0
    if not isinstance(first, Sequence):
        return not isinstance(value, Sequence)
    return isinstance(value, Sequence) and len(value) == len(first) > 0


def _is_token(token: object, vocabulary: int) -> bool:
    return isinstance(token, Integral) and 0 <= int(token) < vocabulary


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number with more than 308 digits
        return False
