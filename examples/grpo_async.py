"""Asynchronous GRPO: completions are sampled while the policy is trained, new weights interrupt them in the middle, and
no trained token is more than two versions old. If it is killed and run again, it resumes from its folder and trains
nothing twice. Run it: ``python examples/grpo_async.py [FOLDER]``.

    tickets ─► engine ─► judge ─► scheduler ─► batch ─► trainer ─► weights ─► engine
"""

import asyncio
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import stretto

LENGTH = 12


def judge(prompt: str, completion: str) -> float:
    """Share of digits that are one more than the digit before them: after 3 comes 456789012345."""
    digits = [int(digit) for digit in prompt + completion]
    return sum((before + 1) % 10 == digit for before, digit in pairwise(digits)) / LENGTH


async def generate(engine: stretto.Engine, scheduler: stretto.Scheduler) -> None:
    """Start each group as soon as the bound allows it, and judge it when it has ended."""

    async def answer(ticket: stretto.Ticket) -> None:
        answers = await asyncio.wrap_future(engine.submit(ticket, max_tokens=LENGTH))
        scheduler.finish(ticket, answers, [judge(ticket.prompt.text, one.text) for one in answers])

    async with asyncio.TaskGroup() as groups:
        async for ticket in scheduler.tickets():
            groups.create_task(answer(ticket))


async def train(
    trainer: stretto.Trainer, engine: stretto.Engine, scheduler: stretto.Scheduler, folder: Path, steps: int
) -> None:
    while trainer.version < steps:
        batch = await scheduler.batch()
        learnt = await asyncio.to_thread(trainer.forward_backward, batch, "decoupled_ppo")
        trainer.optim_step()
        engine.update(trainer.weights())  # mid-completion: these sample the next token
        scheduler.advance(trainer.version, learnt.metrics)
        if trainer.version % 5 == 0:
            trainer.save(folder)
            made = [min(one.versions) < batch.version for group in batch.groups for one in group.trajectories]
            print(f"step {trainer.version}: {learnt.metrics['reward_mean']:.1%} right; {sum(made)} by older versions")


async def main(folder: Path, steps: int = 100) -> None:
    if not (folder / "model").exists():
        stretto.build_model(folder / "model", seed=1, alphabet="0123456789", hidden_size=32, layers=1, head_dim=16)
    with stretto.Ledger(folder) as ledger:
        trainer = stretto.Trainer(folder / "model", learning_rate=5e-3)
        engine = stretto.Engine.load(folder / "model", ledger=ledger)  # records its tokens each second
        if (folder / "checkpoints").exists():
            print(f"going on from version {trainer.load(folder)}")
        engine.update(trainer.weights())
        bounds: dict[str, Any] = {"batch_size": 8, "group_size": 8, "max_in_flight": 4, "max_staleness": 2}
        own: dict[str, Any] = {"tokenizer": engine.tokenizer, "ledger": ledger, "version": trainer.version}
        scheduler = stretto.Scheduler(list("0123456789"), **own, **bounds)
        async with asyncio.TaskGroup() as both:  # an error of one ends the other
            generating = both.create_task(generate(engine, scheduler))
            await train(trainer, engine, scheduler, folder, steps)
            generating.cancel()
        print(ledger.balance())


if __name__ == "__main__":
    asyncio.run(main(Path(*sys.argv[1:2] or ["runs/loop"]), *map(int, sys.argv[2:])))
