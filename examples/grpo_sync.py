"""GRPO in one process: sample, judge, train, sample again. Run it: ``python examples/grpo_sync.py``.

The policy gets a digit and has to count on from it: after 3 comes 456789. The reward is the share of digits that are
right.
"""

import sys
import tempfile
from itertools import pairwise

import stretto

LENGTH = 6


def judge(prompt: str, completion: str) -> float:
    """Share of digits that are one more than the digit before them."""
    digits = [int(digit) for digit in prompt + completion]
    return sum((before + 1) % 10 == digit for before, digit in pairwise(digits)) / LENGTH


def main(steps: int = 80) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        stretto.build_model(folder, seed=1, alphabet="0123456789", hidden_size=32, layers=1, head_dim=16)
        trainer, engine = stretto.Trainer(folder, learning_rate=5e-3), stretto.Engine.load(folder)
    digits, rewards = list("0123456789"), list[float]()
    scheduler = stretto.Scheduler(digits, tokenizer=engine.tokenizer, batch_size=8, group_size=8, max_staleness=0)
    while trainer.version < steps:
        tickets = list(iter(scheduler.admit, None))
        sampled = [engine.submit(one, max_tokens=LENGTH) for one in tickets]
        for ticket, future in zip(tickets, sampled, strict=True):
            answers = future.result()
            scheduler.finish(ticket, answers, [judge(ticket.prompt.text, one.text) for one in answers])
        batch = scheduler.take()
        assert batch is not None, "every group that was admitted is finished"
        learnt = trainer.forward_backward(batch, "ppo", advantages="group")
        trainer.optim_step()
        engine.update(trainer.weights())
        scheduler.advance(trainer.version)
        rewards.append(learnt.metrics["reward_mean"])
        print(f"step {trainer.version}: {rewards[-1]:.1%} right")
    return rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
