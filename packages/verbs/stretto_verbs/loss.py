"""The loss of `Trainer.forward_backward`: a built-in one by its name, or a user's function of log-probabilities."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from stretto.core.errors import Problem, RecipeError
from stretto.doors.mistakes import shown
from stretto.trainer.batch.minibatch import Minibatch
from stretto.trainer.batch.samples import Sample, scored_of
from stretto.trainer.objective.aggregation import Aggregation
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.optimizer import Learner
from stretto_verbs.arguments import checked, plain

#: Maximum likelihood: needs only tokens and their weights.
CROSS_ENTROPY = "cross_entropy"

#: A user's loss: called with (log-probabilities of each sequence, [T] or [T, K]; the sequences, as `Datum`s). Returns
#: the loss, or a pair of the loss and a dict of metrics.
LossFunction = Callable[..., Tensor | tuple[Tensor, Mapping[str, float]]]
#: A name, a section such as ``{"kind": "ppo", "clip_low": 0.1}``, or a function.
Loss = str | Mapping[str, Any] | LossFunction


@dataclass(frozen=True)
class Wanted:
    """A checked loss with its settings, made by `wanted`. `aggregation`: how the losses of tokens become one number.
    `own`: the user's function, in place of the loss of `algorithm`; None: none."""

    name: str
    algorithm: AlgorithmConfig
    aggregation: Aggregation | Literal["sum"]
    own: LossFunction | None = None

    @property
    def likelihood(self) -> bool:
        """Whether the loss is maximum likelihood; a function of this name is not."""
        return self.own is None and self.name == CROSS_ENTROPY

    @property
    def sampled(self) -> bool:
        """Whether the loss needs the log-probabilities and advantages of sampled tokens."""
        return self.own is None and self.name != CROSS_ENTROPY


def wanted(loss: Loss, settings: Mapping[str, Any], place: str) -> Wanted:
    """Check a loss and its settings, and return both as `Wanted`. A function itself is not checked here (`check_own`
    does that), only its settings.

    Args:
        settings: further keys of ``[algorithm]``; `aggregation` may also be "sum".
        place: name of the called method, for messages.

    Raises:
        RecipeError: the loss does not exist, needs a critic, or a setting is invalid.
    """
    settings = dict(settings)
    aggregation = settings.pop("aggregation", "token_mean")
    if aggregation != "sum":
        settings["aggregation"] = aggregation
    if callable(loss):
        config = checked(settings, place, AlgorithmConfig)
        return Wanted(getattr(loss, "__name__", "the loss"), config, aggregation, loss)
    name = loss if isinstance(loss, str) else str(loss.get("kind"))
    given = "policy_gradient" if loss == CROSS_ENTROPY else loss if isinstance(loss, str) else dict(loss)
    config = checked({"loss": given, **settings}, place, AlgorithmConfig)
    if config.critic is not None:
        remedy = "choose other advantages, or train by a recipe, which has critics"
        raise RecipeError([Problem(f"{place}: advantages", "needs a critic, which a Trainer does not have", remedy)])
    return Wanted(name, config, aggregation)


def as_likelihood(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples for maximum likelihood: with advantages of 1, and without behaviour log-probabilities."""
    return [replace(one, behavior_logprobs=(), advantages=(1.0,) * len(one.loss_positions)) for one in samples]


def by_sample(part: Minibatch, samples: Mapping[str, Sample], found: Sequence[Tensor]) -> dict[str, Tensor]:
    """Split the log-probabilities of each micro-batch by sample.

    Args:
        part: the minibatch, with the ids of the samples in each micro-batch.
        samples: by id.
        found: for each micro-batch, the log-probabilities of its samples' scored tokens, one after the other.

    Returns:
        For each sample id, the log-probabilities of its scored tokens.
    """
    columns = dict[str, Tensor]()
    for micro, logprobs in zip(part.micro_batches, found, strict=True):
        sizes = [len(scored_of(samples[id])) for id in micro.ids]
        columns |= dict(zip(micro.ids, logprobs.split(sizes), strict=True))
    return columns


def columns_of(tensors: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Return the numbers of each tensor as a flat tuple."""
    return tuple(tuple(one.flatten().tolist()) for one in tensors)


def own_gradient(
    learner: Learner, part: Minibatch, samples: Sequence[Sample], data: Sequence[object], loss: Wanted, place: str
) -> tuple[float, dict[str, float], list[Tensor]]:
    """Add the gradient of a user's loss to the learner's parameters.

    A single micro-batch is computed once. Several micro-batches are computed twice, so that only one at a time is in
    memory: first to get the gradient with respect to the log-probabilities, then the gradient of the parameters.

    Args:
        learner: holds the model.
        part: the samples as micro-batches.
        samples, data: the same sequences in the same order, for the model and for the function.
        loss: with the user's function, which is called once.
        place: name of the called method, for messages.

    Returns:
        Value of the loss, its metrics, and the log-probabilities of each sample's scored tokens.

    Raises:
        RecipeError: the function returns no tensor with a gradient, or metrics that are not numbers.
    """
    by_id, once = {sample.id: sample for sample in samples}, len(part.micro_batches) == 1
    with torch.set_grad_enabled(once):
        found = [learner.logprobs(micro.packed).logprobs for micro in part.micro_batches]
    columns = by_sample(part, by_id, found)
    logprobs = [columns[sample.id] for sample in samples]
    if not once:
        logprobs = [one.detach().requires_grad_() for one in logprobs]
    for one in logprobs:
        if one.requires_grad:
            one.retain_grad()
    seen = [_by_position(one, sample) for one, sample in zip(logprobs, samples, strict=True)]
    value, metrics = _valued(loss, seen, data, place)
    value.backward()
    if all(one.grad is None for one in logprobs):
        raise _no_loss(loss, place, value)
    if not once:
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in logprobs]
        by_sample_id = {sample.id: one for sample, one in zip(samples, gradients, strict=True)}
        for micro in part.micro_batches:
            slope = torch.cat([by_sample_id[id] for id in micro.ids])
            (learner.logprobs(micro.packed).logprobs * slope).sum().backward()
    return float(value.detach()), metrics, [one.detach() for one in logprobs]


def _by_position(logprobs: Tensor, sample: Sample) -> Tensor:
    """Reshape a sample's log-probabilities to [T], or to [T, K] with K targets at each position; T is its last scored
    position."""
    positions = int(scored_of(sample)[-1])
    return logprobs.reshape(positions, -1) if len(logprobs) > positions else logprobs


def _valued(
    loss: Wanted, logprobs: Sequence[Tensor], data: Sequence[object], place: str
) -> tuple[Tensor, dict[str, float]]:
    """Call the user's function, and return its loss (one element with a gradient) without dimensions, and its metrics
    (empty if it returns none). Raises RecipeError for another kind of result."""
    assert loss.own is not None, "it is the user's"
    found: Any = loss.own(logprobs, data)  # whatever a user's function returns
    value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad or value.is_complex():
        raise _no_loss(loss, place, value)
    numbers: dict[str, Any] = {"": None}
    if isinstance(metrics, Mapping):
        numbers = {name: plain(number) for name, number in metrics.items()}
    if odd := [name for name, number in numbers.items() if not isinstance(number, int | float)]:
        told = f"{loss.name} returned beside the loss {shown(metrics)}"
        at = f"; {shown(odd[0])} is no number" if odd[0] else ""
        raise RecipeError([Problem(f"{place}: loss", told, f"metrics are a dict of numbers{at}")])
    return value.reshape(()), {name: float(number) for name, number in numbers.items()}


def _no_loss(loss: Wanted, place: str, value: object) -> RecipeError:
    remedy = "one number is needed, a tensor that was computed from the log-probabilities"
    return RecipeError([Problem(f"{place}: loss", f"{loss.name} returned {shown(value)}", remedy)])


def check_own(loss: Wanted, proximal: object, place: str) -> None:
    """Check that a user's function can be called with two arguments, and that no setting is given which it would
    ignore. `loss`: with the function. `proximal`: that of `forward_backward`, None if not given; `place`: name of the
    called method, for messages.

    Raises:
        RecipeError: the signature is wrong, or a setting would be ignored; names each of them.
    """
    assert loss.own is not None, "it is the user's"
    try:
        inspect.signature(loss.own).bind((), ())
    except TypeError as error:
        remedy = "it is called with (logprobs, data), the log-probabilities of each sequence and the sequences"
        raise RecipeError([Problem(f"{place}: loss", f"{loss.name}: {error}", remedy)]) from None
    except ValueError:  # written in C, without a signature
        pass
    unheeded = {
        "proximal": proximal is not None,
        "reference": loss.algorithm.divergence("loss") is not None,
        "entropy_bonus": loss.algorithm.entropy_bonus > 0,
        "correction": loss.algorithm.correction != CORRECTIONS("mask"),
        "aggregation": loss.aggregation in ("sequence_mean", "fixed_length"),
    }
    told, remedy = f"is no part of {loss.name}, which is a function", "let the function compute it, or leave it out"
    if problems := [Problem(f"{place}: {name}", told, remedy) for name, given in unheeded.items() if given]:
        raise RecipeError(problems)


def check_data_settings(settings: Mapping[str, Any], place: str) -> None:
    """Check that `settings`, keys of ``[algorithm]``, have none that compute advantages (`advantages`, `shaping`, a
    `reference` in the rewards): a list of data has its own. `place`: name of the called method, for messages. Raises
    RecipeError if such a setting is given; names each of them."""
    of_batches = [name for name in ("advantages", "shaping") if name in settings]
    reference = settings.get("reference")
    of_batches += ["reference"] if isinstance(reference, Mapping) and reference.get("into") == "reward" else []
    told = "is for a batch of groups, and these data have advantages of their own"
    remedies = {"reference": 'leave it out, or give into = "loss"'}
    if problems := [Problem(f"{place}: {one}", told, remedies.get(one, "leave it out")) for one in of_batches]:
        raise RecipeError(problems)
