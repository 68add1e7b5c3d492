"""Results of an evaluation, by question and over all questions: avg@n, pass@k, maj@n, with confidence intervals."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stretto.core.errors import several
from stretto.core.records import Outcome, Prompt, Record, StopReason, Trajectory

_Z = 1.959963984540054  # of a 95% interval


class QuestionResult(Record, frozen=True):
    """Results of one question; a line of ``stretto eval --rows``. `outcomes` to `completions` have one entry per
    completion; `rewards` None: undecided; `lengths` in tokens.

    `answer`: the gold answer. `versions`: all that sampled a token, ascending. `parts`: with several rewards, values by
    name of each decided completion. `majority`: maj@n, 1 if the most frequent final answer is right, 0 if not, 1 / k in
    a tie (the function `majority`); None if the reward does not extract final answers.
    """

    id: str
    prompt: str
    answer: str  # the gold answer
    versions: tuple[int, ...]  # versions that sampled tokens of any completion, ascending
    outcomes: tuple[Outcome, ...]
    rewards: tuple[float | None, ...]  # None: undecided
    lengths: tuple[int, ...]  # tokens
    truncated: tuple[bool, ...]  # cut off at sampling.max_tokens
    completions: tuple[str, ...]
    majority: float | None = None
    parts: tuple[Mapping[str, float], ...] = ()  # with several rewards: values by name, of each decided completion

    @property
    def right(self) -> int:
        return self.outcomes.count(Outcome.RIGHT)

    @classmethod
    def of(
        cls, prompt: Prompt, trajectories: Sequence[Trajectory], finals: Sequence[str | None] | None
    ) -> QuestionResult:
        """Summarise the judged trajectories of a prompt. `finals`: for each its final answer, None if it has none; None
        as a whole if the reward does not extract final answers."""
        verdicts = [one.verdict for one in trajectories]
        outcomes = tuple(verdict.outcome for verdict in verdicts)
        return cls(
            id=prompt.id,
            prompt=prompt.text,
            answer=prompt.answer,
            versions=tuple(sorted({version for one in trajectories for version in one.versions})) or (0,),
            outcomes=outcomes,
            rewards=tuple(verdict.reward for verdict in verdicts),
            lengths=tuple(one.sampled_length for one in trajectories),
            truncated=tuple(one.stop_reason is StopReason.LENGTH for one in trajectories),
            completions=tuple(one.text for one in trajectories),
            majority=majority(outcomes, finals) if finals is not None else None,
            parts=tuple(verdict.rewards for verdict in verdicts if verdict.rewards),
        )


class Evaluation(Record, frozen=True):
    """Held-out accuracy of one evaluation.

    `version`: the newest version that sampled a token. `tokens`: sampled tokens of all completions. `right`,
    `undecided` and `truncated` count completions. Undecided completions do not count as right. `per_prompt`:
    completions of each prompt. `pass_at`: by k. `maj`: share of questions whose most frequent answer is right; None: no
    final answers. `ci95`: of the accuracy; `intervals`: the same of "pass@k" and "maj@n". `rewards`: mean value by
    name, with several rewards.

    Example::

        evaluation = stretto.Evaluation(version=3, prompts=8, right=6, undecided=1, tokens=120)
        print(evaluation, evaluation.accuracy)  # accuracy 0.7500: 6 of 8 right, 1 undecided 0.75
    """

    version: int
    prompts: int
    right: int
    undecided: int
    tokens: int
    per_prompt: int = 1  # completions of each prompt
    truncated: int = 0  # completions that were cut off at sampling.max_tokens
    length_max: int = 0
    pass_at: Mapping[int, float] = {}  # by k
    maj: float | None = None  # share of questions whose most frequent answer is right; None: no final answers
    ci95: tuple[float, float] = (0.0, 1.0)  # 95% interval of the accuracy
    intervals: Mapping[str, tuple[float, float]] = {}  # as `ci95`, for "pass@k" and "maj@n"
    rewards: Mapping[str, float] = {}  # with several rewards: mean unweighted value by name

    @classmethod
    def of(cls, results: Sequence[QuestionResult]) -> Evaluation:
        """Combine the results of all questions: sums, pass@k and maj@n averaged over questions, and their 95%
        intervals. There must be at least one, all with the same number of completions."""
        samples = len(results[0].outcomes)
        shares = [result.right / samples for result in results]
        majorities = [result.majority for result in results if result.majority is not None]
        passes = {k: [pass_at(k, result.right, samples) for result in results] for k in sizes(samples)}
        by_name = {f"pass@{k}": values for k, values in passes.items()} | {f"maj@{samples}": majorities}
        return cls(
            version=max(version for result in results for version in result.versions),
            prompts=len(results),
            right=sum(result.right for result in results),
            undecided=sum(result.outcomes.count(Outcome.UNDECIDED) for result in results),
            tokens=sum(sum(result.lengths) for result in results),
            per_prompt=samples,
            truncated=sum(sum(result.truncated) for result in results),
            length_max=max(max(result.lengths) for result in results),
            pass_at={k: sum(values) / len(results) for k, values in passes.items()},
            maj=sum(majorities) / len(majorities) if majorities else None,
            ci95=interval(shares),
            intervals={name: interval(values) for name, values in by_name.items() if values and samples > 1},
            rewards=mean_rewards(part for result in results for part in result.parts),
        )

    @property
    def samples(self) -> int:
        """Number of completions."""
        return self.prompts * self.per_prompt

    @property
    def accuracy(self) -> float:
        """avg@n: the share of right completions."""
        return self.right / self.samples

    @property
    def length_mean(self) -> float:
        """Mean tokens per completion."""
        return self.tokens / self.samples

    def __str__(self) -> str:
        note = f", {self.undecided} undecided" if self.undecided else ""
        accuracy = f"{self.accuracy:.4f}" if self.undecided < self.samples else "–"
        return f"accuracy {accuracy}: {self.right} of {self.samples} right{note}"

    def table(self) -> str:
        """Format the evaluation as several lines: the text of `str`, then 95% interval, pass@k and maj@n (with several
        completions), mean rewards by name, questions, lengths, truncated; with names on the left."""
        low, high = self.ci95
        rows = [("95% interval", f"{low:.4f} to {high:.4f}")]
        if self.per_prompt > 1:
            values = {f"pass@{k}": value for k, value in self.pass_at.items()}
            values |= {f"maj@{self.per_prompt}": self.maj} if self.maj is not None else {}
            rows += [(name, f"{value:.4f}{self._within(name)}") for name, value in values.items()]
        rows += [(name, f"{value:.4f} on average") for name, value in self.rewards.items()]
        rows.append(("questions", f"{self.prompts:,}, {several(self.per_prompt, 'completion')} each"))
        rows.append(("length", f"{self.length_mean:.1f} tokens on average, {self.length_max} at most"))
        rows.append(("truncated", f"{self.truncated:,} of {self.samples:,}"))
        return "\n".join([str(self), *(f"{name:>14}  {value}" for name, value in rows)])

    def _within(self, name: str) -> str:
        return " (95% interval {:.4f} to {:.4f})".format(*self.intervals[name]) if name in self.intervals else ""

    def as_json(self) -> str:
        """Format the evaluation as a JSON object: all fields, and in addition `accuracy` (also as `avg`; null if no
        completion has a verdict), `questions`, `samples` and `length_mean`."""
        accuracy = self.accuracy if self.undecided < self.samples else None  # without one verdict it is unknown
        more = {
            "accuracy": accuracy,
            "avg": accuracy,
            "questions": self.prompts,
            "samples": self.samples,
            "length_mean": self.length_mean,
        }
        return msgspec.json.encode(msgspec.structs.asdict(self) | more).decode()


def asked_of(prompts: Sequence[Prompt], samples: int, seed: int) -> str:
    """Compute a digest of what an evaluation asks: its prompts with their answers, the number of completions of each,
    and the seed. Accuracies with other digests are not compared."""
    whole = msgspec.json.encode(([(one.id, one.token_ids, one.answer) for one in prompts], samples, seed))
    return hashlib.blake2b(whole, digest_size=8).hexdigest()


def mean_rewards(judged: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Compute the mean of each named reward over the completions that have it; empty without any. `judged`: rewards by
    name, for each completion.

    >>> mean_rewards([{"correct": 1.0, "form": 0.5}, {"correct": 0.0}])
    {'correct': 0.5, 'form': 0.5}
    """
    values: dict[str, list[float]] = {}
    for rewards in judged:
        for name, value in rewards.items():
            values.setdefault(name, []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def pass_at(k: int, right: int, samples: int) -> float:
    """Estimate pass@k of a question: the probability that at least one of `k` completions is right.

    Of the `samples` completions, `right` are right, and `k` are drawn without replacement:
    ``1 - C(samples - right, k) / C(samples, k)``, unbiased (Chen et al., arXiv 2107.03374, section 2.1).

    >>> pass_at(2, right=1, samples=4)
    0.5

    Raises:
        ValueError: `k` is more than `samples`, or less than 1.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs {k} completions or more of each question, there are {samples}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def sizes(samples: int) -> list[int]:
    """List the k for which pass@k is shown: the powers of two up to `samples`, and `samples`.

    >>> sizes(6)
    [1, 2, 4, 6]
    """
    return sorted({2**power for power in range(samples.bit_length()) if 2**power <= samples} | {samples})


def majority(outcomes: Sequence[Outcome], finals: Sequence[str | None]) -> float:
    """Compute maj@n of a question: 1 if the most frequent answer of its completions is right, else 0. If k answers are
    equally frequent and one of them is right, it is 1 / k. Without votes it is 0.

    A right completion votes for the gold answer, a wrong one for its final answer (`finals`, one for each of
    `outcomes`). Undecided completions, and wrong ones without a final answer (None), do not vote.

    >>> majority([Outcome.RIGHT, Outcome.WRONG, Outcome.WRONG], ["1/2", "3", "3"])
    0.0
    """
    votes: Counter[str | None] = Counter()  # None: the gold answer
    for outcome, final in zip(outcomes, finals, strict=True):
        if outcome is Outcome.RIGHT:
            votes[None] += 1
        elif outcome is Outcome.WRONG and final is not None:
            votes[final] += 1
    most = max(votes.values(), default=0)
    return 1.0 / sum(count == most for count in votes.values()) if most and votes[None] == most else 0.0


def interval(shares: Sequence[float]) -> tuple[float, float]:
    """Compute the 95% confidence interval of the mean of `shares`: the share of right completions of each question.
    Without questions it is (0, 1).

    It is Wilson's score interval of n trials. If a question has one completion, n is the number of questions. If it has
    several, n is the larger, effective number of independent completions, from the variance of `shares` (clustered
    errors: Miller, arXiv 2411.00640, section 2.2). With no right completion it is 0 to z² / (n + z²); with all right, 1
    minus that.
    """
    count = len(shares)
    if not count:
        return 0.0, 1.0
    mean = math.fsum(shares) / count
    variance = math.fsum((share - mean) ** 2 for share in shares) / count
    effective = count * max(1.0, mean * (1.0 - mean) / variance) if variance > 0 else float(count)
    spread = _Z * math.sqrt(mean * (1.0 - mean) / effective + (_Z / (2.0 * effective)) ** 2)
    middle = mean + _Z * _Z / (2.0 * effective)
    scale = 1.0 + _Z * _Z / effective
    low = (middle - spread) / scale if mean > 0.0 else 0.0  # the difference of two equal numbers, but for rounding
    high = (middle + spread) / scale if mean < 1.0 else 1.0
    return max(0.0, low), min(1.0, high)
