"""For a person watching a run: samples of completions, and alarms about the reward."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from stretto.core.records import Outcome, Prompt, Trajectory
from stretto.store.folder.run_folder import RunFolder
from stretto.store.series.lines import LineWriter
from stretto.store.series.progress import LONGEST
from stretto.store.series.samples import SampledCompletion

_ALARM_GROUPS = 32  # groups without a right completion before the first alarm; doubles each time
_KINDS = 20  # kinds of undecided verdicts reported
_PROMPT, _GOLD, _WORTH = 26, 14, 24  # characters beside a completion on its line
WINDOW = 10.0  # window in seconds: workers report their time only when a completion is judged
_SATURATED = 0.9


class WatchedSamples:
    """Shows and stores one judged group every `seconds` (0: none), and raises alarms.

    Alarms: each kind of undecided verdict, once; no right completion so far, again at twice as many groups.
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
        """Take a judged group: show a sample of it if one is due, and raise alarms."""
        self._note_right(trajectories)
        self._note_undecided(trajectories)
        if trajectories and self._seconds and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._seconds
            self._show([SampledCompletion.of(prompt, t.versions, t.text, t.verdict) for t in trajectories])

    def held_out(self, samples: Sequence[SampledCompletion]) -> None:
        """Store the samples of a finished evaluation."""
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
        """Show the first sample, and one with another outcome if there is one."""
        others = [sample for sample in samples if sample.outcome is not samples[0].outcome]
        shown = [samples[0], *others[:1]]
        self._samples.append(shown)
        for sample in shown:
            self._say(line(sample))


def line(sample: SampledCompletion) -> str:
    """A sample on one line of at most `LONGEST` characters.

    >>> line(SampledCompletion(7, "17", "3+8=", "11", "3+8=11", Outcome.RIGHT, 1.0, "", (6, 7)))
    "sample v6-7: '3+8=' -> '3+8=11' | gold '11' | right, reward 1"
    """
    first, last = sample.versions[0], sample.versions[-1]
    version = f"{first}" if first == last else f"{first}-{last}"
    worth = " ".join(sample.reason.split()) if sample.reward is None else f"reward {sample.reward:g}"
    if sample.rewards:
        worth += f" ({', '.join(f'{name} {value:g}' for name, value in sample.rewards.items())})"
    prompt, gold = _short(sample.prompt, _PROMPT), _short(sample.answer, _GOLD)
    before, behind = f"sample v{version}: {prompt} -> ", f" | gold {gold} | "
    behind += f"{sample.outcome.value}, {worth if len(worth) <= _WORTH else f'{worth[: _WORTH - 3]}...'}"
    return f"{before}{_short(sample.completion, LONGEST - len(before) - len(behind))}{behind}"


def _short(text: str, room: int) -> str:
    """A text in quotes; if longer than `room`, its start and its end, where the final answer is.

    >>> _short("3+8=11", 20), _short("three and eight are eleven", 20)
    ("'3+8=11'", "'three a ... eleven'")
    """
    shown, kept = repr(text[: room + 1]), min(len(text), room)
    while len(shown) > room and kept > 0:
        kept -= 1
        shown = repr(f"{text[: kept - kept // 2]} ... {text[len(text) - kept // 2 :]}")
    return shown


class SlowReward:
    """Detects a reward slower than generation: its workers are always busy while the engines are not.

    `name`: the reward's name in the recipe.
    """

    def __init__(self, name: str, workers: int) -> None:
        self.name, self.workers = name, workers
        self.found = ""  #: the reward's name while it is the bottleneck, else ""
        self._told = False
        self._seen: deque[tuple[float, float, float]] = (
            deque()
        )  # (time, busy seconds of the rewards, of the busiest engine)

    def poll(self, now: float, seconds: Mapping[str, float]) -> str | None:
        """Call every second with the total busy `seconds` by role; returns a log line once, else None.

        Example: rewards 9.8 s and engine-0 4.0 s of work in the last 10 s.
        """
        engines = [worked for role, worked in seconds.items() if role.startswith("engine")]
        self._seen.append((now, seconds.get("rewards", 0.0), max(engines, default=0.0)))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()
        (since, judged_then, generated_then), (_, judged, generated) = self._seen[0], self._seen[-1]
        if now - since < WINDOW:
            return None
        judging, generating = (judged - judged_then) / (now - since), (generated - generated_then) / (now - since)
        self.found = self.name if judging >= _SATURATED and generating < _SATURATED * judging else ""
        if not self.found or self._told:
            return None
        self._told = True
        return (
            f"the reward {self.name!r} is slower than generation: its workers are busy {min(1.0, judging):.0%} of the "
            f"time, the busiest engine {min(1.0, generating):.0%}; rewards.workers = {self.workers} may be too few"
        )
