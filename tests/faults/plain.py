"""Synchronous reinforcement learning as one plain loop: no conductor, no processes, no admission, no ledger.

The engine and the trainer are the real ones. What the whole system does at ``max_staleness = 0`` has to be this, bit
for bit.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stretto.core.records import Batch, GenerateRequest, Group, Outcome, Trajectory, Verdict, derive_seed, trajectory_id
from stretto.engine.native.engine import NativeEngine
from stretto.launch.preflight.plan import Plan
from stretto.model.hf.folder import load_policy
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.rollout.prompts import Draw, PromptStream
from stretto.trainer.trainer import Trainer
from tests.launch.rewards_for_tests import length


def train_plainly(plan: Plan, start: Path) -> tuple[list[Batch], Mapping[str, Tensor]]:
    """Train the recipe's steps from the policy in `start`; all batches, and the last weights."""
    torch.set_num_threads(1)
    recipe = plan.recipe
    engine = NativeEngine.load(start, recipe.engine)
    model = load_policy(start, attention=PACKED_ATTENTION, dtype=torch.float32, device="cpu")
    trainer = Trainer(model, recipe.trainer, recipe.algorithm, plan.sampling)
    stream = PromptStream(plan.training, recipe.seed)
    batches = []
    for version in range(recipe.trainer.steps):
        draws = [stream.take() for _ in range(recipe.rollout.batch_size)]
        batches.append(Batch(step=version + 1, version=version, groups=_answered(plan, engine, draws, version)))
        trainer.train(batches[-1])
        engine.update(trainer.version, dict(model.named_parameters()))
    return batches, dict(model.named_parameters())


def _answered(plan: Plan, engine: NativeEngine, draws: list[Draw], version: int) -> tuple[Group, ...]:
    members = range(plan.recipe.rollout.group_size)
    for draw in draws:
        seeds = tuple(derive_seed(plan.recipe.seed, trajectory_id(draw.group_id, member)) for member in members)
        prompt = draw.prompt.token_ids
        engine.add(GenerateRequest(id=draw.group_id, prompt_token_ids=prompt, seeds=seeds, sampling=plan.sampling))
    answers: dict[str, list[Trajectory]] = {draw.group_id: [] for draw in draws}
    prompts = {draw.group_id: draw.prompt for draw in draws}
    while not engine.idle:
        for completion in engine.step():
            id, text = completion.request, plan.tokenizer.decode(completion.token_ids)
            reward = length(prompts[id].text, text, prompts[id].answer)
            verdict = Verdict(outcome=Outcome.RIGHT if reward == 1 else Outcome.WRONG, reward=reward)
            name = trajectory_id(id, completion.member)
            answers[id].append(Trajectory(id=name, segments=(completion.segment,), verdict=verdict, text=text))
    return tuple(
        Group(id=id, prompt=prompts[id], admitted_version=version, trajectories=tuple(sorted(those, key=_member)))
        for id, those in answers.items()
    )


def _member(trajectory: Trajectory) -> int:
    return trajectory.member
