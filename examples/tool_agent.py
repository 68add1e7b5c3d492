"""An agent with a tool: it may have a die thrown, and is to say what the die shows. Demonstrations, most of them wrong,
show how one asks; that the answer is worth repeating it learns from the reward. Run it: ``python
examples/tool_agent.py``. What the tool says is in the context, and no part of the loss.

    r ─► "?" (policy) ─► "=4" (tool) ─► "4" (policy) ─► reward 1
"""

import random
import sys
import tempfile

import stretto

Turns = list[stretto.TextCompletion | tuple[int, ...]]


def demonstration(trainer: stretto.Trainer, draw: random.Random) -> stretto.Datum:
    """A question to the tool, its answer, and what is said then: one time in three what the die shows."""
    shows = draw.randint(1, 6)
    said = draw.choice((shows, draw.randint(1, 6), draw.randint(1, 6)))
    tokens = trainer.tokenizer.encode(f"r?={shows}{said}")
    return stretto.Datum(tokens[:-1], tokens[1:], weights=(1.0, 0.0, 0.0, 1.0))


def converse(engine: stretto.Engine, history: tuple[int, ...], seed: int) -> tuple[Turns, float]:
    """One trajectory: what was said, the answer of the tool between it, and the reward."""
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
    bounds = {"batch_size": 4, "group_size": 16, "max_staleness": 0}
    scheduler = stretto.Scheduler(["r"], tokenizer=engine.tokenizer, version=start.version, **bounds)
    while len(rewards) < steps:
        for ticket in iter(scheduler.admit, None):
            made = [converse(engine, ticket.prompt.token_ids, seed) for seed in ticket.seeds]
            scheduler.finish(ticket, [turns for turns, _ in made], [reward for _, reward in made])
        learnt = trainer.forward_backward(scheduler.take(), "ppo")
        trainer.optim_step(learning_rate=2e-3)
        engine.update(trainer.weights())
        scheduler.advance(trainer.version)
        rewards.append(learnt.metrics["reward_mean"])
        print(f"step {len(rewards)}: {rewards[-1]:.0%} say what the die shows")
    return rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
