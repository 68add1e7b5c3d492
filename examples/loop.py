"""Asynchronous reinforcement learning on one page: generation never waits for training, nor training for generation.

    prompt ─► admission ─► engine ─► judge ─► buffer ─► batch ─► trainer ─► weights ─┐
                 ▲            ▲ interrupted in mid-completion, and goes on by them   │
                 └────────────┴──────────────────────────────────────────────────────┘

The policy is shown a digit and is to count on from it: after 3 comes 456789012345. At first it knows nothing, and the
only thing it is told is the share of its steps that were right. Run it: ``python examples/loop.py``. A whole run
(`stretto train`) has the same parts, each in a process of its own, with a ledger, checkpoints and spare parts.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterable
from itertools import pairwise

from torch import Tensor

from stretto.core import records
from stretto.core.records import Batch, Completion, Group, Prompt, Trajectory
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto.model.hf.folder import load_policy
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.model.packed.attention import PACKED_ATTENTION
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller, Ticket
from stretto.rollout.prompts import PromptStream
from stretto.trainer.config import TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.trainer import Trainer
from stretto.weights.mailbox import Gather, as_it_is

MODEL = BuildConfig(hidden_size=32, layers=1, heads=2, kv_heads=2, head_dim=16, alphabet="0123456789")
ROLLOUT = RolloutConfig(batch_size=8, group_size=8, max_in_flight=4, max_staleness=2)
LENGTH = 12


def judge(prompt: str, completion: str) -> float:
    """The share of digits that are one more than the digit before them."""
    digits = [int(digit) for digit in prompt + completion]
    return sum((before + 1) % 10 == digit for before, digit in pairwise(digits)) / LENGTH


class Mailbox:
    """Where the trainer puts a version of the weights, and the engine finds it. Neither knows the other."""

    version, tensors = 0, dict[str, Tensor]()

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], gather: Gather = as_it_is) -> None:
        self.version, self.tensors = version, {name: gather(name, one).detach().clone() for name, one in tensors}


class Counts:
    """The journal: the controller writes each change of state here before it takes effect. A run's is a ledger."""

    issued = trained = 0

    def issue(self, group_id: str, prompt: Prompt, members: int, admitted_version: int) -> None:
        self.issued += members

    def buffer(self, group: Group) -> None: ...

    def settle(self, id: str, state: records.State, reason: str, trajectory: Trajectory | None = None) -> None: ...

    def commit_batch(self, batch: Batch) -> None:
        self.trained += sum(len(group.trajectories) for group in batch.groups)

    def change_bound(self, change: object) -> None: ...


async def generate(engine: NativeEngine, controller: Controller, mailbox: Mailbox, tokenizer: Tokenizer) -> None:
    """Until it is cancelled: load new weights, admit what may start, sample one token of everything, judge."""
    sampling = records.Sampling(max_tokens=LENGTH)
    groups: dict[str, tuple[Ticket, list[Completion]]] = {}
    while True:
        if mailbox.version > engine.version:
            # Completions under way stop here; their next tokens are sampled by the new weights, and say so.
            engine.update(mailbox.version, mailbox.tensors)
            controller.load(engine.version)
        # Equation 3: of N groups ever started, floor(N / batch) <= version + staleness. Beyond it, generation waits.
        while (ticket := controller.admit()) is not None:
            prompt = ticket.draw.prompt.token_ids
            engine.add(records.GenerateRequest(ticket.group_id, prompt, ticket.seeds, sampling))
            groups[ticket.group_id] = ticket, []
        # One token for every completion, in a thread: the trainer computes meanwhile in another.
        for completion in await asyncio.to_thread(engine.step):
            ticket, group = groups[completion.request]
            group.append(completion)
            if len(group) == ROLLOUT.group_size:
                controller.finish(ticket, judged(ticket, group, tokenizer))
                del groups[completion.request]
        if engine.idle:
            await asyncio.sleep(0.001)  # nothing may start before the trainer's next version


def judged(ticket: Ticket, group: list[Completion], tokenizer: Tokenizer) -> list[Trajectory]:
    """The completions of one prompt with their rewards: the group among which they are compared."""
    trajectories = []
    for completion in group:
        text = tokenizer.decode(completion.token_ids)
        reward = judge(ticket.draw.prompt.text, text)
        verdict = records.Verdict(records.Outcome.RIGHT if reward == 1 else records.Outcome.WRONG, reward)
        name = records.trajectory_id(ticket.group_id, completion.member)
        trajectories.append(Trajectory(name, (completion.segment,), verdict, text))
    return trajectories


async def train(trainer: Trainer, controller: Controller, mailbox: Mailbox, steps: int) -> list[float]:
    """Take the oldest finished groups, learn from them, publish the next version. Returns the mean rewards."""
    rewards: list[float] = []
    while trainer.version < steps:
        if (batch := controller.take()) is None:
            await asyncio.sleep(0.001)  # too few groups are finished
            continue
        update = await asyncio.to_thread(trainer.train, batch)
        trainer.publish(mailbox)
        controller.publish(update.version)
        learned = [trajectory for group in batch.groups for trajectory in group.trajectories]
        rewards.append(sum(trajectory.reward for trajectory in learned) / len(learned))
        if update.version % 10 == 0:
            mixed = sum(len(set(trajectory.versions)) > 1 for trajectory in learned)
            print(f"step {update.version:4}: {rewards[-1]:6.1%} right; {mixed} of {len(learned)} by several versions")
    return rewards


async def main(steps: int = 150) -> tuple[list[float], Counts]:
    with tempfile.TemporaryDirectory() as folder:
        build_policy(MODEL, folder, seed=1)
        tokenizer = load_tokenizer(folder)
        engine = NativeEngine.load(folder, EngineConfig(slots=128, cache_gib=0.1))
        policy = load_policy(folder, attention=PACKED_ATTENTION)
    trainer = Trainer(policy, TrainerConfig(steps=steps, minibatches=1, learning_rate=5e-3), AlgorithmConfig())
    prompts = [Prompt(id=digit, token_ids=tokenizer.encode(digit), text=digit, answer="") for digit in "0123456789"]
    counts, mailbox = Counts(), Mailbox()
    controller = Controller(ROLLOUT, PromptStream(prompts, seed=1), counts, seed=1)
    async with asyncio.TaskGroup() as both:  # what fails in one of them ends the other
        generating = both.create_task(generate(engine, controller, mailbox, tokenizer))
        rewards = await train(trainer, controller, mailbox, steps)
        generating.cancel()
    return rewards, counts


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
