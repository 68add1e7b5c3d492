"""A user-defined loss: a function of log-probabilities, here for learning from preference pairs (DPO, arXiv
2305.18290). The policy learns to prefer the first of two completions. Run it: ``python examples/own_loss.py``.
"""

import random
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import stretto

BETA = 0.5
Loss = Callable[[Sequence[Tensor], Sequence[stretto.Datum]], tuple[Tensor, dict[str, float]]]


def pair(draw: random.Random) -> tuple[str, str, str]:
    """Draw a digit, four digits that count on from it (chosen), and four random digits (rejected)."""
    first = draw.randrange(10)
    chosen = "".join(str((first + step) % 10) for step in range(1, 5))
    return str(first), chosen, "".join(draw.choices("0123456789", k=4))


def preference(before: stretto.Forward) -> Loss:
    """Make the DPO loss over data in the order chosen, rejected, chosen, … `before`: log-probabilities of the reference
    policy."""

    def loss(logprobs: Sequence[Tensor], data: Sequence[stretto.Datum]) -> tuple[Tensor, dict[str, float]]:
        start = [torch.tensor(one) for one in before.logprobs]
        gained = [
            ((now - then) * torch.tensor(datum.weights)).sum()
            for now, then, datum in zip(logprobs, start, data, strict=True)
        ]
        chosen, rejected = torch.stack(gained).view(-1, 2).unbind(1)
        accuracy = (chosen > rejected).float().mean()
        return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean(), {"accuracy": float(accuracy)}

    return loss


def main(steps: int = 40) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        stretto.build_model(folder, seed=1, alphabet="0123456789", hidden_size=32, layers=1, head_dim=16)
        trainer, start = (stretto.Trainer(folder, learning_rate=5e-3) for _ in range(2))
    encode, draw, accuracies = trainer.tokenizer.encode, random.Random(1), list[float]()
    for step in range(steps):
        pairs = [pair(draw) for _ in range(16)]
        data = [stretto.Datum.of(encode(prompt), encode(said)) for prompt, *both in pairs for said in both]
        learnt = trainer.forward_backward(data, preference(start.forward(data)))
        trainer.optim_step()
        accuracies.append(learnt.metrics["accuracy"])
        print(f"step {step}: loss {learnt.loss:.3f}, {accuracies[-1]:.0%} of the pairs in order")
    return accuracies


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
