"""Lengths of a real run, for benchmarks of training: `benchmarks/data/lengths.json`.

    python -m benchmarks.lengths RUN_DIR --from STEP --steps N      exports them

A batch is a list of groups; a group has the number of tokens of its prompt, and of each of its answers. The tokens
themselves do not matter for speed; `batch` makes random ones.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from stretto.core.records import Batch, Completion, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict
from stretto_report.reading.export import read_trajectories

FILE = Path(__file__).resolve().parent / "data" / "lengths.json"

#: Tokens of a prompt, and of each answer to it.
GroupLengths = tuple[int, tuple[int, ...]]


def load(path: Path = FILE) -> list[list[GroupLengths]]:
    """Lengths of each batch, in the order of training."""
    return [
        [(prompt, tuple(answers)) for prompt, *answers in groups] for groups in json.loads(path.read_text())["batches"]
    ]


def tokens(groups: Iterable[GroupLengths]) -> int:
    """Number of answer tokens, which are trained on."""
    return sum(sum(answers) for _, answers in groups)


def batch(groups: Sequence[GroupLengths], vocabulary: int, version: int, seed: int = 1) -> Batch:
    """Make a batch of these lengths, with random tokens stamped with `version`."""
    rng = random.Random(f"{seed} {version}")
    made = []
    for g, (prompt_tokens, answers) in enumerate(groups):
        prompt = Prompt(id=str(g), token_ids=_drawn(rng, prompt_tokens, vocabulary), text="", answer="")
        trajectories = tuple(_trajectory(rng, g, m, length, vocabulary, version) for m, length in enumerate(answers))
        made.append(Group(id=str(g), prompt=prompt, admitted_version=version, trajectories=trajectories))
    return Batch(step=version, version=version, groups=tuple(made))


def _drawn(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2, vocabulary) for _ in range(count))


def _trajectory(rng: random.Random, group: int, member: int, length: int, vocabulary: int, version: int) -> Trajectory:
    completion = Completion(
        str(group),
        member,
        Segment.of(
            token_ids=_drawn(rng, length, vocabulary),
            behavior_logprobs=tuple(rng.uniform(-8.0, -6.0) for _ in range(length)),
            versions=(version,) * length,
            stop_reason=StopReason.STOP,
        ),
    )
    verdict = Verdict(outcome=Outcome.RIGHT, reward=float(rng.randrange(2)))
    return Trajectory(id=f"{group}/{member}", segments=(completion.segment,), verdict=verdict, text="")


def export(run: Path, first: int, steps: int) -> list[list[list[int]]]:
    """Lengths of the batches that a run trained on in `steps` steps from `first` on."""
    batches: dict[int, dict[str, list[int]]] = {step: {} for step in range(first, first + steps)}
    for t in read_trajectories(run):
        if t.trained_step in batches:
            group = batches[t.trained_step].setdefault(t.group, [len(t.prompt_token_ids)])
            group.append(len(t.token_ids))
    return [list(groups.values()) for groups in batches.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--from", dest="first", type=int, default=301)
    parser.add_argument("--steps", type=int, default=24)
    words = parser.parse_args()
    batches = export(words.run, words.first, words.steps)
    about = f"trained steps {words.first} to {words.first + words.steps - 1}: tokens of each prompt and of its answers"
    lines = ",\n  ".join(json.dumps(groups, separators=(",", ":")) for groups in batches)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(f'{{"about": {json.dumps(about)},\n "batches": [\n  {lines}]}}\n')


if __name__ == "__main__":
    main()
