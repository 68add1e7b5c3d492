"""An agent with a tool: it may throw a die, and has to say what the die shows. Demonstrations show how to call the
tool, but most state a wrong number; from the reward the agent learns to repeat the tool's result. Run it: ``python
examples/tool_agent.py``. The tool's result is in the context, and not in the loss.

    r ─► "?" (policy) ─► "=4" (tool) ─► "4" (policy) ─► reward 1
"""

import random
import sys
import tempfile
from typing import Any

import stretto

Turns = list[stretto.TextCompletion | tuple[int, ...]]


def demonstration(trainer: stretto.Trainer, draw: random.Random) -> stretto.Datum:
    """A tool call, its result, and a statement, which is right in four of nine cases."""
    shows = draw.randint(1, 6)
    said = draw.choice((shows, draw.randint(1, 6), draw.randint(1, 6)))
    tokens = trainer.tokenizer.encode(f"r?={shows}{said}")
    return stretto.Datum(tokens[:-1], tokens[1:], weights=(1.0, 0.0, 0.0, 1.0))


def converse(engine: stretto.Engine, history: tuple[int, ...], seed: int) -> tuple[Turns, float]:
    """Make one trajectory: its turns, with the tool's result between them, and its reward."""
    [first] = engine.sample(history, seeds=[seed], max_tokens=1)
    if first.text != "?":
        return [first], 0.0
    shows = str(random.Random(seed).randint(1, 6))
    answer = engine.tokenizer.encode(f"={shows}")
    [second] = engine.sample((*history, *first.token_ids, *answer), seeds=[seed], max_tokens=1)
    return [first, answer, second], float(second.text == shows)


def main(steps: int = 30) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        stretto.build_model(folder, seed=1, alphabet="123456?=r", hidden_size=32, layers=2, head_dim=16)
        trainer, engine = stretto.Trainer(folder, learning_rate=5e-3), stretto.Engine.load(folder)
    draw, rewards = random.Random(1), list[float]()
    for _ in range(60):
        trainer.forward_backward([demonstration(trainer, draw) for _ in range(32)], "cross_entropy")
        trainer.optim_step()
    start = trainer.weights()
    engine.update(start)
    bounds: dict[str, Any] = {"batch_size": 4, "group_size": 16, "max_staleness": 0}
    scheduler = stretto.Scheduler(["r"], tokenizer=engine.tokenizer, version=start.version, **bounds)
    while len(rewards) < steps:
        for ticket in iter(scheduler.admit, None):
            made = [converse(engine, ticket.prompt.token_ids, seed) for seed in ticket.seeds]
            scheduler.finish(ticket, [turns for turns, _ in made], [reward for _, reward in made])
        batch = scheduler.take()
        assert batch is not None, "every group that was admitted is finished"
        learnt = trainer.forward_backward(batch, "ppo")
        trainer.optim_step(learning_rate=2e-3)
        engine.update(trainer.weights())
        scheduler.advance(trainer.version)
        rewards.append(learnt.metrics["reward_mean"])
        print(f"step {len(rewards)}: {rewards[-1]:.0%} say what the die shows")
    return rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
