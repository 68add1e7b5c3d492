"""``metrics.jsonl``: one line per training step and one per evaluation. ``samples.jsonl`` and ``held_out.jsonl``:
sampled completions as text, with prompt and verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from stretto.core.records import Outcome, Prompt, Record, Verdict
from stretto.store.selection import Bias
from stretto.store.series.lines import Extent, LineWriter, iterate_lines, keep_lines
from stretto.store.totals import Category

Line = TypeVar("Line", bound="EvaluationLine")


class StepMetrics(Record, frozen=True, tag="step", tag_field="kind"):
    """The measurements of one training step (docs/reference/metrics.md). `accuracy`: of completions judged since the
    step before; `reward`, lengths, staleness: of the batch. `busy`: fraction of about the last second, by role;
    `memory`: MiB by role. `max_staleness`: the bound; None: none, or not recorded. A value that is not finite is null
    in the file.

    Example::

        step = stretto.open_run("runs/first").metrics[-1]
        print(step.step, step.accuracy, step.staleness_max, step.trainer["loss"])
    """

    step: int
    version: int  # published by this step
    wall_seconds: float  # since the run started, warm start included
    rl_seconds: float  # since the first prompt was admitted, until this update
    accuracy: float  # of the completions judged since the step before, those of filtered groups included
    reward: float  # mean over the batch's completions
    length_mean: float  # sampled tokens per completion of the batch, masked ones included
    length_max: int
    staleness_mean: float  # versions, over the trained tokens
    staleness_max: int
    trained_tokens: int  # in this step
    masked_tokens: int = 0
    skipped: tuple[str, ...] = ()  # trajectories of optimizer steps that were not taken: the gradient was not finite
    generated_tokens: int = 0  # by all engines for training prompts, since the start
    trainer: Mapping[str, float | None] = {}  # measurements by the trainer (loss, grad_norm, ...)
    queues: Mapping[str, float | None] = {}  # sizes when the batch was taken (buffer, in_flight, ...)
    busy: Mapping[str, float | None] = {}  # role: fraction of about the last second
    memory: Mapping[str, float | None] = {}  # role: MiB of its processes, seconds ago at most
    slower_than_generation: str = ""  # name of the reward, if the run waits for it
    rewards: Mapping[str, float | None] = {}  # with several rewards: mean value of each, by name, before its weight
    goodput: Mapping[str, Category] = {}  # category: seconds of all roles together, and tokens, since the start
    max_staleness: float | None = None  # the bound in force when the batch was taken; None: no bound, or not recorded
    truncated: float | None = None  # share of the batch's completions that were cut off; None: not recorded
    canary: Mapping[str, float] = {}  # engine: distance from the trainer, as a share of its tolerance (canary.md)
    selection_bias: Mapping[str, Bias] = {}  # length, difficulty, latency: in the newest complete window, if any
    undecided: float | None = None  # share of the completions judged since the step before; None: not recorded
    undecided_reason: str = ""  # newest reason of the most frequent kind among them


class EvaluationLine(Record, frozen=True, tag="evaluation", tag_field="kind"):
    """Held-out accuracy of one version, on prompts that are never trained on, sampled with a fixed seed. `samples`:
    completions of all prompts; 0 in an old run, with one for each. `undecided`: completions without a verdict. `maj`:
    share of prompts whose most frequent answer is right. `asked`: digest of prompts, number of completions and seed.

    Example::

        line = stretto.open_run("runs/first").evaluations[-1]
        print(line.version, line.accuracy, line.prompts)
    """

    step: int
    version: int
    wall_seconds: float
    rl_seconds: float
    accuracy: float
    prompts: int
    undecided: int = 0  # completions without a verdict: neither right nor wrong
    samples: int = 0  # completions of all prompts together; 0: an old run, with one for each
    truncated: int = 0  # completions that were cut off at sampling.max_tokens
    length_mean: float | None = None  # tokens per completion
    pass_at: Mapping[int, float] = {}  # k: pass@k, the probability that one of k completions is right
    maj: float | None = None  # share of prompts whose most frequent answer is right
    ci95: tuple[float, float] | None = None  # 95% confidence interval of the accuracy
    rewards: Mapping[str, float] = {}  # with several rewards: mean value of each, by name, before its weight
    asked: str = ""  # digest of the prompts, the completions of each, and the seed; empty in an old run

    @property
    def known(self) -> float | None:
        """The accuracy; None if no completion has a verdict."""
        return self.accuracy if self.undecided < (self.samples or self.prompts) else None

    def is_like(self, prompts: int, samples: int, asked: str) -> bool:
        """Whether this accuracy may be compared with that of another evaluation, of `prompts` prompts with `samples`
        completions together (0: one for each): both asked the same prompts with the same seed. `asked`: the other's
        digest; where one has none, the numbers decide."""
        counts = (self.prompts, self.samples or self.prompts)
        return counts == (prompts, samples or prompts) and (self.asked == asked or not (self.asked and asked))


def alike(lines: Sequence[Line]) -> list[Line]:
    """Return the evaluations of `lines` (of one set of questions, in order) whose accuracy may be compared with that of
    the last one (itself included): a resumed run may have other prompts, completions or seeds."""
    return [line for line in lines if line.is_like(lines[-1].prompts, lines[-1].samples, lines[-1].asked)]


class SetEvaluationLine(EvaluationLine, frozen=True, tag="evaluation_set", tag_field="kind"):
    """Accuracy on a further set of questions (``[[evaluation.sets]]``)."""

    name: str = ""


MetricsLine = StepMetrics | EvaluationLine | SetEvaluationLine

METRICS: msgspec.json.Decoder[MetricsLine] = msgspec.json.Decoder(MetricsLine)  #: of a line of ``metrics.jsonl``
_STEP = b'{"kind":"step",'  # as each line of a step begins


class MetricsLog:
    """Appends to ``metrics.jsonl``. A file that cannot be written does not end the run (see `LineWriter`)."""

    def __init__(self, path: Path) -> None:
        self._writer: LineWriter[MetricsLine] = LineWriter(path)

    def append(self, line: MetricsLine) -> None:
        self._writer.append([line])

    @property
    def extent(self) -> Extent:
        """That of the file, as of `LineWriter`."""
        return self._writer.extent


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[EvaluationLine]]:
    """Read (steps, evaluations) of a run, each in order; both empty if there is no file. Evaluations of further sets
    are left out. Raises StoreError or OSError if a line or the file cannot be read."""
    steps, evaluations = list[StepMetrics](), list[EvaluationLine]()
    for line in iterate_metrics(path):
        if isinstance(line, StepMetrics):
            steps.append(line)
        else:
            evaluations.append(line)
    return steps, evaluations


def iterate_metrics(path: Path) -> Iterator[StepMetrics | EvaluationLine]:
    """Yield the lines of `read_metrics` in the order of the file, which is read as it is iterated; so a damaged line
    raises StoreError, and an unreadable file OSError, only then."""
    return (line for line in iterate_lines(path, METRICS) if not isinstance(line, SetEvaluationLine))


def read_evaluations(path: Path) -> dict[str, list[EvaluationLine]]:
    """Read all evaluations of a run, in order, by the name of their set of questions; "" is the main set. Sets without
    any have no entry. The lines of steps are not looked at. Raises StoreError or OSError if another line or the file
    cannot be read."""
    found: dict[str, list[EvaluationLine]] = {}
    for line in iterate_lines(path, METRICS, but=_STEP):
        if isinstance(line, SetEvaluationLine | EvaluationLine):
            found.setdefault(line.name if isinstance(line, SetEvaluationLine) else "", []).append(line)
    return found


#: Name of the ledger's fact with the `Extent` of ``metrics.jsonl`` and of ``held_out.jsonl``, by name. It is written in
#: one transaction with the newest update, so a resume after it keeps all of these lines.
WRITTEN = "written"


def rewind_metrics(path: Path, step: int, written: Extent | None = None) -> None:
    """Remove the lines of later steps than `step`: the run is resumed after it, and will write them again
    (`keep_lines`, with `written`). Does nothing without a file."""
    keep_lines(path, METRICS, lambda line: line.step <= step, written)


class SampledCompletion(Record, frozen=True):
    """One judged completion. `answer`: the gold answer. `reward`: None if undecided. `versions`: versions that sampled
    its tokens. `version`: the newest of them; for a completion of an evaluation, the newest of the whole evaluation.

    Example: ``SampledCompletion(prompt_id="17", prompt="3+8=", answer="11", completion="3+8=11", ...)``
    """

    version: int
    prompt_id: str
    prompt: str
    answer: str  # the gold answer
    completion: str
    outcome: Outcome
    reward: float | None  # None: undecided
    reason: str
    versions: tuple[int, ...]
    rewards: Mapping[str, float] = {}  # with several rewards: the value of each, by name, before its weight

    @classmethod
    def of(cls, prompt: Prompt, versions: tuple[int, ...], text: str, verdict: Verdict) -> Self:
        """Return the record of one completion. `versions`: of its tokens, in any order, with repetitions; without any,
        it is recorded as of version 0."""
        versions = tuple(sorted(set(versions))) or (0,)  # sorted: with parallel turns, versions may fall
        return cls(
            version=versions[-1],
            prompt_id=prompt.id,
            prompt=prompt.text,
            answer=prompt.answer,
            completion=text,
            outcome=verdict.outcome,
            reward=verdict.reward,
            reason=verdict.reason,
            versions=versions,
            rewards=verdict.rewards,
        )


_SAMPLES = msgspec.json.Decoder(SampledCompletion)


def rewind_samples(path: Path, version: int, written: Extent | None = None) -> None:
    """Remove completions of later versions than `version`: the run is resumed there, and will sample them again
    (`keep_lines`, with `written`). Does nothing without a file."""
    keep_lines(path, _SAMPLES, lambda sample: sample.version <= version, written)
