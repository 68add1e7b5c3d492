"""What the policy writes and what the reward says of it, for a person who watches: samples, and alarms by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from stretto.core.records import Outcome, Prompt, Trajectory
from stretto.store.folder.run_folder import RunFolder
from stretto.store.series.lines import LineWriter
from stretto.store.series.samples import SampledCompletion

_ALARM_GROUPS = 32  # without a right completion; then at twice as many each time
_KINDS = 20  # of undecided verdicts that are told
_SHOWN = 240  # characters of one text on one line


class Sampled:
    """Hears of every judged group. Every `seconds` one of them is shown and kept; 0: none is.

    Said once for each kind: why a verdict is undecided. Said again at twice as many groups: that none is right.
    """

    def __init__(self, folder: RunFolder, say: Callable[[str], None], seconds: float) -> None:
        self._say, self._seconds = say, seconds
        self._samples: LineWriter[SampledCompletion] = LineWriter(folder.samples)
        self._held_out: LineWriter[SampledCompletion] = LineWriter(folder.held_out)
        self._due = float("-inf")
        self._groups = self._completions = 0
        self._alarm = _ALARM_GROUPS
        self._right = False
        self._kinds: set[str] = set()

    def judged(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> None:
        """One more group has its verdicts."""
        self._note_right(trajectories)
        self._note_undecided(trajectories)
        if trajectories and self._seconds and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._seconds
            self._show([SampledCompletion.of(prompt, t.versions, t.text, t.verdict) for t in trajectories])

    def held_out(self, samples: Sequence[SampledCompletion]) -> None:
        """An evaluation is whole."""
        self._held_out.append(samples)

    def _note_right(self, trajectories: Sequence[Trajectory]) -> None:
        self._right = self._right or any(t.verdict.outcome is Outcome.RIGHT for t in trajectories)
        self._groups, self._completions = self._groups + 1, self._completions + len(trajectories)
        if not self._right and self._groups >= self._alarm:
            self._alarm = 2 * self._groups
            self._say(
                f"no completion has been right so far: {self._groups:,} groups, {self._completions:,} completions; "
                "look at the completions and the gold answers in samples.jsonl of the run folder: does the reward "
                "read them, is sampling.max_tokens enough?"
            )

    def _note_undecided(self, trajectories: Sequence[Trajectory]) -> None:
        for reason in (t.verdict.reason for t in trajectories if t.verdict.outcome is Outcome.UNDECIDED):
            kind = reason.partition(": ")[0]
            if kind not in self._kinds and len(self._kinds) < _KINDS:
                self._kinds.add(kind)
                self._say(f"a completion is undecided: {reason} (said once; `stretto export` has all of them)")

    def _show(self, samples: Sequence[SampledCompletion]) -> None:
        """The first one, and one with another outcome if there is one."""
        others = [sample for sample in samples if sample.outcome is not samples[0].outcome]
        shown = [samples[0], *others[:1]]
        self._samples.append(shown)
        for sample in shown:
            self._say(line(sample))


def line(sample: SampledCompletion) -> str:
    """A sample on one line.

    >>> line(SampledCompletion(7, "17", "3+8=", "11", "3+8=11", Outcome.RIGHT, 1.0, "", (6, 7)))
    "sample of version 6 to 7: prompt '3+8=' | completion '3+8=11' | gold '11' | right, reward 1"
    """
    first, last = sample.versions[0], sample.versions[-1]
    version = f"{first}" if first == last else f"{first} to {last}"
    worth = sample.reason if sample.reward is None else f"reward {sample.reward:g}"
    prompt, completion, gold = map(_short, (sample.prompt, sample.completion, sample.answer))
    return (
        f"sample of version {version}: prompt {prompt} | completion {completion} | gold {gold} | "
        f"{sample.outcome.value}, {worth}"
    )


def _short(text: str) -> str:
    """Both ends, since the final answer is at the end."""
    half = _SHOWN // 2
    return repr(text if len(text) <= _SHOWN else f"{text[:half]} ... {text[-half:]}")
