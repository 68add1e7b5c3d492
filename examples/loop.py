"""Asynchronous reinforcement learning on one page: generation never waits for training, nor training for generation.

    prompt ─► admission ─► engine ─► judge ─► buffer ─► batch ─► trainer ─► weights ─┐
                 ▲            ▲ interrupted in mid-completion, and goes on by them   │
                 └────────────┴──────────────────────────────────────────────────────┘

The policy is shown a digit and is to count on from it: after 3 comes 456789012345. At first it knows nothing, and the
only thing it is told is the share of its steps that were right. Run it: ``python examples/loop.py``. A whole run
(`stretto train`) has the same parts, each in a process of its own, with a ledger, checkpoints and spare parts.
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
    """The share of digits that are one more than the digit before them."""
    digits = [int(digit) for digit in prompt + completion]
    return sum((before + 1) % 10 == digit for before, digit in pairwise(digits)) / LENGTH


async def generate(engine: stretto.Engine, scheduler: stretto.Scheduler) -> None:
    """Until it is cancelled: start each group that may start, judge it when its last completion has ended."""

    async def answer(ticket: stretto.Ticket) -> None:
        # The engine samples one token of everything that is under way, in a thread of its own: the trainer computes
        # meanwhile in another. The completions of one prompt are a group: they are compared with each other.
        future = engine.submit(ticket, max_tokens=LENGTH)
        answers = await asyncio.wrap_future(future)
        scheduler.finish(ticket, answers, [judge(ticket.prompt.text, one.text) for one in answers])

    async with asyncio.TaskGroup() as groups:  # what fails in one of them ends all
        # Equation 3: of N groups ever started, floor(N / batch) <= version + staleness. Beyond it, generation waits.
        async for ticket in scheduler.tickets():
            groups.create_task(answer(ticket))


async def train(
    trainer: stretto.Trainer, engine: stretto.Engine, scheduler: stretto.Scheduler, steps: int
) -> tuple[list[float], list[int]]:
    """Take the oldest finished groups, learn from them, load the next version. Returns the mean rewards, and how many
    versions old each token was."""
    rewards, ages = list[float](), list[int]()
    while trainer.version < steps:
        batch = await scheduler.batch()
        learnt = await asyncio.to_thread(trainer.forward_backward, batch, "decoupled_ppo", advantages="group")
        trainer.optim_step()
        # Completions under way stop here; their next tokens are sampled by the new weights, and say so.
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
