"""Batches that a tiny model can be trained on: answers of 1 to 7 tokens, made up or scored by a given policy."""

import random

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stretto.core.records import Batch, Completion, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto.model.packed.logprobs import pack_tokens, token_logprobs
from stretto.trainer.batch.samples import Sample
from stretto.trainer.optimizer import UNCHANGED
from tests.tolerances import EPS, RATE, after_adam
from tests.trainer.tiny import BACKWARD

GROUPS, ANSWERS, LONGEST = 3, 4, 7


def batch(version: int, model: PreTrainedModel | None = None, oldest_trainable: int = 0) -> Batch:
    """Answers of 1 to 7 tokens; the behaviour policy is the given model, or something else altogether."""
    rng = random.Random(version)
    groups = []
    for g in range(GROUPS):
        prompt = Prompt(id=str(g), token_ids=tuple(rng.randrange(13) for _ in range(2 + g)), text="", answer="")
        trajectories = tuple(_trajectory(rng, prompt, m, version, model) for m in range(ANSWERS))
        groups.append(Group(id=str(g), prompt=prompt, admitted_version=0, trajectories=trajectories))
    return Batch(step=version, version=version, groups=tuple(groups), oldest_trainable=oldest_trainable)


def _trajectory(
    rng: random.Random, prompt: Prompt, member: int, version: int, model: PreTrainedModel | None
) -> Trajectory:
    answer = tuple(rng.randrange(13) for _ in range(rng.randint(1, LONGEST)))
    logprobs = tuple(rng.uniform(-4, -1) for _ in answer)
    if model is not None:
        start = len(prompt.token_ids)
        packed = pack_tokens([prompt.token_ids + answer], [range(start, start + len(answer))])
        logprobs = tuple(token_logprobs(model, packed, UNCHANGED).logprobs.tolist())
    completion = Completion(
        prompt.id,
        member,
        Segment.of(
            token_ids=answer,
            behavior_logprobs=logprobs,
            versions=tuple(sorted(rng.randint(max(0, version - 2), version) for _ in answer)),
            stop_reason=StopReason.LENGTH,
        ),
    )
    verdict = Verdict(outcome=Outcome.RIGHT, reward=float(rng.randrange(3)))
    return Trajectory(id=f"{prompt.id}/{member}", segments=(completion.segment,), verdict=verdict, text="")


def sample_logprobs(model: PreTrainedModel, sample: Sample) -> tuple[Tensor, Tensor]:
    """The plain module on one sample, no packing of several: log p of its loss tokens, and the entropy there."""
    packed = pack_tokens([sample.token_ids])
    ids, positions = packed.input_ids, packed.packing.position_ids
    logits = model(ids, position_ids=positions, use_cache=False, packing=packed.packing).logits[0]
    at = torch.tensor(sample.loss_positions)
    logprobs = logits.log_softmax(-1)[at - 1]
    return logprobs.gather(1, ids[0, at][:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def adamw(model: PreTrainedModel) -> torch.optim.AdamW:
    """The optimizer of `OptimizerConfig(learning_rate=RATE, eps=EPS, weight_decay=0.1)`."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=EPS)


def assert_same(left: PreTrainedModel, right: PreTrainedModel, steps: int = 0) -> None:
    """After some steps of RATE and EPS that took different ways; to the last bit where there were none."""
    tolerance = after_adam(steps, BACKWARD)
    for (name, ours), theirs in zip(left.named_parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=name)
