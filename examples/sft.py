"""Supervised fine-tuning: the policy learns to count from demonstrations. Run it: ``python examples/sft.py``."""

import random
import sys
import tempfile

import stretto

LENGTH = 6


def demonstration(digit: int) -> tuple[str, str]:
    """Prompt and completion for a digit: after 3 comes 456789."""
    return str(digit), "".join(str((digit + step) % 10) for step in range(1, LENGTH + 1))


def main(steps: int = 150) -> float:
    with tempfile.TemporaryDirectory() as folder:
        stretto.build_model(folder, seed=1, alphabet="0123456789", hidden_size=32, layers=1, head_dim=16)
        trainer, engine = stretto.Trainer(folder, learning_rate=1e-2), stretto.Engine.load(folder)
    encode, draw = trainer.tokenizer.encode, random.Random(1)
    for step in range(steps):
        shown = [demonstration(draw.randrange(10)) for _ in range(16)]
        data = [stretto.Datum.of(encode(prompt), encode(completion)) for prompt, completion in shown]
        loss = trainer.forward_backward(data, "cross_entropy").loss
        trainer.optim_step(learning_rate=1e-2 * (1 - step / steps))
        if step % 25 == 0:
            print(f"step {step}: {loss:.3f} nats a token")
    engine.update(trainer.weights())
    prompts, wanted = zip(*map(demonstration, range(10)), strict=True)
    said = engine.generate(list(prompts), max_tokens=LENGTH, temperature=0)
    right: float = sum(one.text == answer for one, answer in zip(said, wanted, strict=True)) / len(wanted)
    print(f"{right:.0%} of the prompts are continued as shown")
    return right


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
