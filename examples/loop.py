"""Asynchronous reinforcement learning on one page: generation and training run side by side.

    prompt ─► admission ─► engine ─► judge ─► buffer ─► batch ─► trainer ─► weights ─┐
                 ▲            ▲ interrupted mid-completion, continues with them      │
                 └────────────┴──────────────────────────────────────────────────────┘

The policy gets a digit and has to count on from it: after 3 comes 456789012345. It starts with random weights, and its
reward is the share of digits that are right. Run it: ``python examples/loop.py``. A whole run (`stretto train`) has the
same parts, each in a process of its own that is replaced when it dies, with a ledger and checkpoints.
"""

import asyncio
import sys
import tempfile
from itertools import pairwise
from typing import Any

import stretto

LENGTH = 12
BOUNDS: dict[str, Any] = {"batch_size": 8, "group_size": 8, "max_in_flight": 4, "max_staleness": 2}


def judge(prompt: str, completion: str) -> float:
    """Share of digits that are one more than the digit before them."""
    digits = [int(digit) for digit in prompt + completion]
    return sum((before + 1) % 10 == digit for before, digit in pairwise(digits)) / LENGTH


async def generate(engine: stretto.Engine, scheduler: stretto.Scheduler) -> None:
    """Start each group that may start, and judge it when its last completion has ended, until cancelled."""

    async def answer(ticket: stretto.Ticket) -> None:
        # The engine samples the completions of all groups in flight in a thread of its own; the trainer computes in
        # another. The completions of one prompt are a group, and are compared with each other.
        future = engine.submit(ticket, max_tokens=LENGTH)
        answers = await asyncio.wrap_future(future)
        scheduler.finish(ticket, answers, [judge(ticket.prompt.text, one.text) for one in answers])

    async with asyncio.TaskGroup() as groups:  # an error of one group ends all
        # Equation 3: with N groups started before, floor(N / batch_size) <= version + max_staleness; else it waits.
        async for ticket in scheduler.tickets():
            groups.create_task(answer(ticket))


async def train(
    trainer: stretto.Trainer, engine: stretto.Engine, scheduler: stretto.Scheduler, steps: int
) -> tuple[list[float], list[int]]:
    """Take the oldest finished groups, train on them, load the new version. Return the mean reward of each step, and
    the age in versions of each trained token."""
    rewards, ages = list[float](), list[int]()
    while trainer.version < steps:
        batch = await scheduler.batch()
        learnt = await asyncio.to_thread(trainer.forward_backward, batch, "decoupled_ppo", advantages="group")
        trainer.optim_step()
        # Completions in flight are interrupted here. Their next tokens are sampled, and stamped, by the new version.
        engine.update(trainer.weights())
        scheduler.advance(trainer.version)
        learned = [trajectory for group in batch.groups for trajectory in group.trajectories]
        rewards.append(learnt.metrics["reward_mean"])
        ages += [batch.version - version for trajectory in learned for version in trajectory.versions]
        if trainer.version % 10 == 0:
            mixed = sum(len(set(trajectory.versions)) > 1 for trajectory in learned)
            print(f"step {trainer.version:4}: {rewards[-1]:6.1%} right; {mixed} of {len(learned)} by several versions")
    return rewards, ages


async def main(steps: int = 150) -> tuple[list[float], list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        stretto.build_model(folder, seed=1, alphabet="0123456789", hidden_size=32, layers=1, head_dim=16)
        trainer = stretto.Trainer(folder, learning_rate=5e-3)
        engine = stretto.Engine.load(folder, cache_gib=0.1)
    scheduler = stretto.Scheduler(list("0123456789"), tokenizer=engine.tokenizer, seed=1, **BOUNDS)
    async with asyncio.TaskGroup() as both:
        generating = both.create_task(generate(engine, scheduler))
        learnt = await train(trainer, engine, scheduler, steps)
        generating.cancel()
    return learnt


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
