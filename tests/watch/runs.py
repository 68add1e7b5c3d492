"""Small runs, written by the writers of real ones."""

from pathlib import Path
from typing import Any

import numpy as np

from stretto.core.canary import CANARY, CanaryRecord, Proof
from stretto.core.events import Span
from stretto.core.records import Batch, Group, Prompt, Segment, State, StopReason, Trajectory
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import SpanLog
from stretto.store.series.metrics import EvaluationLine, MetricsLog, StepMetrics
from stretto.store.series.tokens import SampledTokens, TokenFiles
from stretto.store.totals import ENGINES, TOTALS, Membership, Totals
from tests.store import lines
from tests.store.make import ledger_at, trained, verdict

HOSTILE = "</script><img src=x onerror=alert(1)>\x00\x1b[2J\u202egnp.exe\u2066"
RECIPE = '[trainer]\nsteps = 3\n[task]\nkind = "arithmetic"\n[rollout]\nmax_staleness = 2.0\n'
LOG = "2026-11-22 03:08:40  starts at version 0\n"
ENDED = "2026-11-22 03:08:45  ends with exit code 0\n"


def prompt(name: str, text: str) -> Prompt:
    return Prompt(id=name, token_ids=(5, 12, 8, 13), text=text, answer="11")


END = StopReason.STOP


def completion(
    group: str, member: int, reward: float, versions: tuple[int, ...], text: str = "11", stop: StopReason = END
) -> Trajectory:
    """A single turn: tokens 3, 4, ...; log-probabilities -0.5, -1.0, ..."""
    length = len(versions)
    engines = (("engine-0", 2), ("engine-1", length - 2)) if length > 2 else (("engine-0", length),)
    logprobs = tuple(-0.5 * (at + 1) for at in range(length))
    interrupted = len(set(versions)) - 1
    segment = Segment.of(tuple(range(3, 3 + length)), logprobs, versions, interrupted, stop, engines)
    return Trajectory(f"{group}/{member}", (segment,), verdict(reward, above=0.5), text)


def step_line(step: int, entropy: float | None = None, **changed: Any) -> StepMetrics:
    numbers: dict[str, Any] = {
        "rl_seconds": 2.0 * step,
        "length_max": 4,
        "length_mean": 3.0,
        "staleness_mean": 0.5,
        "staleness_max": 1,
    }
    numbers |= {"trained_tokens": 6, "masked_tokens": 2, "generated_tokens": 8 * step, "reward": 0.1 * step}
    maps: dict[str, Any] = {"trainer": {"loss": 1.0 / step, "entropy": entropy}, "busy": {"trainer": 0.5}}
    return lines.step_line(step, **(numbers | maps | {"canary": {"engine-0": 0.04, "engine-1": 0.05}} | changed))


def write_run(path: Path, *, log: str = LOG + ENDED) -> Path:
    """Three groups of two: 0.a.0 is trained in step 1, 0.b.0 in step 2 with its first token masked, 0.c.0 fails; and
    one group that is in flight, with three tokens on record. What became of each token is on record of step 2 alone."""
    with RunFolder.create(path) as folder:
        folder.write("recipe.toml", RECIPE)
        folder.write("log.txt", log)
        asked = (f'{{"id":"{name}","prompt":"{text}","answer":"11","row":null}}\n' for name, text in QUESTIONS.items())
        folder.write("questions.jsonl", "".join(asked))
        with ledger_at(folder.ledger) as ledger:
            _write_ledger(ledger)
        TokenFiles(folder.tokens, 1.0).write(2, {"0.b.0/0": 4, "0.b.0/1": 1}, TOKENS)
        metrics, spans = MetricsLog(folder.metrics), SpanLog(folder.spans)
        metrics.append(evaluation(0, 0.25))
        for step in (1, 2):
            metrics.append(step_line(step, entropy=1.5))
        metrics.append(evaluation(2, 0.5))
        spans.append(SPANS)
    return path


#: Step 2: one too old, one trained, one clipped at a ratio above 1, one masked by the correction; one clipped below 1.
TOKENS = SampledTokens(
    trainer_logprob=np.array([np.nan, -1.0, -1.25, -2.5, -0.75], dtype=np.float32),
    ratio=np.array([np.nan, 1.0, 1.5, 0.5, 0.5], dtype=np.float32),
    advantage=np.array([np.nan, 0.25, 0.25, 0.25, -0.25], dtype=np.float32),
    outcome=np.array([0, 1, 1 | 2, 1 | 4 | 8, 1 | 2], dtype=np.uint8),
)
QUESTIONS = {"a": "3+8=", "b": "7+4=", "c": "1+1="}
SPANS = (
    Span(role="trainer", name="proximal", start=100.0, end=100.5, version=0),
    Span(role="trainer", name="update", start=100.5, end=102.0, version=0),
    Span(role="engine-1", name="generate", start=100.0, end=104.0, version=0),
    Span(role="engine-0", name="generate", start=100.0, end=101.0, version=0),
    Span(role="engine-0", name="load", start=101.0, end=101.25, version=1),
    Span(role="engine-0", name="generate", start=101.25, end=103.0, version=1),
)


#: The newest of two engines; and the worst of the run, which was refused.
PROOFS = (
    Proof("engine-0", "native float32", 2, 4e-8, 1e-6, 1e-7, proven=True),
    Proof("engine-1", "native float32", 1, 5e-8, 1e-6, 1e-7, proven=True),
    Proof("engine-1", "native float32", 0, 0.25, 1e-6, 1e-7, proven=False),
)


def evaluation(step: int, accuracy: float) -> EvaluationLine:
    return lines.evaluation_line(step, accuracy, rl_seconds=2.0 * step, prompts=8)


def _write_ledger(ledger: Ledger) -> None:
    ledger.put(TOTALS, Totals(max_staleness=2.0, generated=16, final_accuracy=0.5, rl_seconds=4.0, wall_seconds=12.0))
    ledger.put(
        ENGINES, (Membership("engine-0", "native", "node-3", 2, 0), Membership("engine-1", "native", "here", 2, 0))
    )
    ledger.put(CANARY, CanaryRecord(newest=PROOFS[:2], worst=PROOFS[2:], refused=1))
    first = (completion("0.a.0", 0, 1.0, (0, 0, 0)), completion("0.a.0", 1, 0.0, (0, 0), HOSTILE, StopReason.LENGTH))
    train(ledger, 1, "a", first)
    second = (completion("0.b.0", 0, 0.75, (0, 1, 1, 1)), completion("0.b.0", 1, 0.25, (1,)))
    train(ledger, 2, "b", second, oldest=1)
    ledger.issue("0.c.0", prompt("c", "1+1="), 2, 1)
    for member in range(2):
        ledger.settle(f"0.c.0/{member}", State.FAILED, "timeout after 1 s")
    ledger.issue("1.a.0", prompt("a", "3+8="), 2, 2)
    ledger.journal("1.a.0/0", Segment.of((3, 4, 5), (-0.5, -1.0, -1.5), (2, 2, 2)))
    ledger.event("role", "engine-1 ended with exit code 1: a new one is started")


def train(ledger: Ledger, step: int, name: str, members: tuple[Trajectory, ...], oldest: int = 0) -> None:
    """A group is issued, judged, and trained alone in a step."""
    asked = prompt(name, QUESTIONS.get(name, name))
    group = Group(members[0].id.rpartition("/")[0], asked, step - 1, members)
    trained(ledger, Batch(step=step, version=step - 1, groups=(group,), oldest_trainable=oldest))
    ledger.flush()
