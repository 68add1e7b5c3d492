"""On-policy distillation: a small student samples completions, a teacher gives its log-probability of each token, and
the student is trained towards the teacher. Run it: ``python examples/distill.py``.

The advantage of a token is log teacher - log student: the policy gradient is that of -KL(student || teacher).
"""

import sys
import tempfile
from pathlib import Path
from statistics import fmean

import stretto

LENGTH = 6
PROMPTS = list("0123456789")


def taught(folder: Path, steps: int = 120) -> stretto.Engine:
    """Train a teacher to count in digits (after 3 comes 456789), and return its engine."""
    trainer, engine = stretto.Trainer(folder, learning_rate=1e-2), stretto.Engine.load(folder)
    encode = trainer.tokenizer.encode
    counts = ["".join(str((int(prompt) + step) % 10) for step in range(LENGTH + 1)) for prompt in PROMPTS]
    data = [stretto.Datum.of(encode(count[:1]), encode(count[1:])) for count in counts]
    for _ in range(steps):
        trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step()
    engine.update(trainer.weights())
    return engine


def main(steps: int = 80) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        shapes = {"teacher": (64, 2), "student": (32, 1)}
        for seed, (name, (width, layers)) in enumerate(shapes.items()):
            place = Path(folder, name)
            stretto.build_model(place, seed=seed, alphabet="0123456789", hidden_size=width, layers=layers, head_dim=16)
        teacher = taught(Path(folder, "teacher"))
        student = Path(folder, "student")
        trainer, engine = stretto.Trainer(student, learning_rate=5e-3), stretto.Engine.load(student)
    divergences = list[float]()
    for step in range(steps):
        prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS * 4]
        said = engine.generate(prompts, max_tokens=LENGTH)
        judged = teacher.score([(*prompt, *one.token_ids) for prompt, one in zip(prompts, said, strict=True)])
        data, gaps = [], list[float]()
        for prompt, one, scores in zip(prompts, said, judged, strict=True):
            better = [max(-5.0, t - s) for t, s in zip(scores[len(prompt) - 1 :], one.logprobs, strict=True)]
            data.append(stretto.Datum.of(prompt, one.token_ids, logprobs=one.logprobs, advantages=better))
            gaps += better
        trainer.forward_backward(data, "ppo")
        trainer.optim_step()
        engine.update(trainer.weights())
        divergences.append(-fmean(gaps))
        if step % 10 == 0:
            print(f"step {step}: {divergences[-1]:.3f} nats a token from the teacher")
    return divergences


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
