"""An agent with a tool: the policy may ask for a number that it cannot know, and learns to ask and to use the answer.
Run it: ``python examples/tool_agent.py``.

Two letters go in. If the first thing that the policy says is "?", the tool answers with a digit; then the policy says
one digit more, and is right if that is the number of the letters. What the tool says is no part of the loss.
"""

import sys
import tempfile

import stretto

LETTERS = "abcdefgh"


def secret(question: str) -> str:
    """The tool: a number of two letters."""
    first, second = map(LETTERS.index, question)
    return str((7 * first + 3 * second) % 10)


def converse(
    engine: stretto.Engine, ticket: stretto.Ticket, seed: int
) -> tuple[list[stretto.TextCompletion | tuple[int, ...]], float]:
    """One trajectory: what was said, the result of the tool between it, and the reward."""
    history, question = ticket.prompt.token_ids, ticket.prompt.text
    [first] = engine.sample(history, seeds=[seed], max_tokens=1)
    if first.text != "?":
        return [first], float(first.text == secret(question))
    result = engine.tokenizer.encode(f"={secret(question)}")
    [second] = engine.sample((*history, *first.token_ids, *result), seeds=[seed], max_tokens=1)
    return [first, result, second], 0.2 + 0.8 * (second.text == secret(question))


def main(steps: int = 60) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        alphabet = "0123456789?=" + LETTERS
        stretto.build_model(folder, seed=1, alphabet=alphabet, hidden_size=32, layers=2, head_dim=16)
        trainer, engine = stretto.Trainer(folder, learning_rate=5e-3), stretto.Engine.load(folder)
    questions = [first + second for first in LETTERS for second in LETTERS]
    scheduler = stretto.Scheduler(questions, tokenizer=engine.tokenizer, batch_size=8, group_size=16, max_staleness=0)
    rewards = list[float]()
    while trainer.version < steps:
        for ticket in iter(scheduler.admit, None):
            made = [converse(engine, ticket, seed) for seed in ticket.seeds]
            scheduler.finish(ticket, [turns for turns, _ in made], [reward for _, reward in made])
        learnt = trainer.forward_backward(scheduler.take(), "ppo")
        trainer.optim_step()
        engine.update(trainer.weights())
        scheduler.advance(trainer.version)
        rewards.append(learnt.metrics["reward_mean"])
        print(f"step {trainer.version}: mean reward {rewards[-1]:.2f}")
    return rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
