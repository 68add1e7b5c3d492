"""Log lines for a person who watches a run: sampled completions, and alarms about the reward."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from stretto.core.errors import several
from stretto.core.records import Outcome, Prompt, Trajectory
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import Extent, LineWriter
from stretto.store.series.metrics import SampledCompletion
from stretto.store.series.progress import LONGEST

_ALARM_GROUPS = 32  # groups without a right completion before the first alarm; doubles each time
_KINDS = 20  # most kinds of undecided verdicts that are reported
_PROMPT, _GOLD, _WORTH = 26, 14, 24  # most characters of prompt, gold answer and reward on a sample's line
WINDOW = 10.0  # window in seconds: workers report their time only when a completion is judged
_SATURATED = 0.9


class WatchedSamples:
    """Logs one or two completions of a judged group every `seconds` (0: never) through `say`, and appends them to
    ``samples.jsonl``; those of evaluations go to ``held_out.jsonl``. Logs alarms.

    There are two alarms. A completion is undecided: logged once for each kind of reason, of at most 20 kinds. No
    completion has been right so far: logged after 32 groups, then each time their number has doubled. `right`: one has
    been, in an earlier process of the run.
    """

    def __init__(self, folder: RunFolder, say: Callable[[str], None], seconds: float, right: bool = False) -> None:
        self._say, self._seconds = say, seconds
        self._samples: LineWriter[SampledCompletion] = LineWriter(folder.samples)
        self._held_out: LineWriter[SampledCompletion] = LineWriter(folder.held_out)
        self._due = float("-inf")
        self._groups = self._completions = 0
        self._alarm = _ALARM_GROUPS
        self._right = right
        self._kinds: set[str] = set()
        self._undecided, self._reasons = Counter[str](), dict[str, str]()  # since the last step, by kind of reason

    def judged(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> int:
        """Log alarms that this judged group causes, and log and store one or two samples of it if they are due; returns
        the number of its undecided completions. `trajectories`: of the group of `prompt`, with verdicts."""
        self._note_right(trajectories)
        undecided = self._note_undecided(trajectories)
        if trajectories and self._seconds and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._seconds
            self._show([SampledCompletion.of(prompt, t.versions, t.text, t.verdict) for t in trajectories])
        return undecided

    def held_out(self, samples: Sequence[SampledCompletion]) -> None:
        """Append the samples of a finished evaluation to ``held_out.jsonl``."""
        self._held_out.append(samples)

    @property
    def extent(self) -> Extent:
        """That of ``held_out.jsonl``."""
        return self._held_out.extent

    def _note_right(self, trajectories: Sequence[Trajectory]) -> None:
        self._right = self._right or any(t.verdict.outcome is Outcome.RIGHT for t in trajectories)
        self._groups, self._completions = self._groups + 1, self._completions + len(trajectories)
        if not self._right and self._groups >= self._alarm:
            self._alarm = 2 * self._groups
            self._say(
                f"no completion has been right so far: {several(self._groups, 'group')}, "
                f"{several(self._completions, 'completion')}; "
                "look at the completions and the gold answers in samples.jsonl of the run folder: does the reward "
                "read them, is sampling.max_tokens enough?"
            )

    def usual_reason(self) -> str:
        """Return the newest reason of the most frequent kind among the undecided verdicts since the last call; "" if
        there were none. The kind is the reason up to its first ": "."""
        kinds, reasons = self._undecided, self._reasons
        self._undecided, self._reasons = Counter(), {}
        return reasons[kinds.most_common(1)[0][0]] if kinds else ""

    def _note_undecided(self, trajectories: Sequence[Trajectory]) -> int:
        reasons = [t.verdict.reason for t in trajectories if t.verdict.outcome is Outcome.UNDECIDED]
        for reason in reasons:
            kind = reason.partition(": ")[0]
            self._undecided[kind] += 1
            self._reasons[kind] = reason
            if kind not in self._kinds and len(self._kinds) < _KINDS:
                self._kinds.add(kind)
                self._say(f"a completion is undecided: {reason} (said once; `stretto export` has all of them)")
        return len(reasons)

    def _show(self, samples: Sequence[SampledCompletion]) -> None:
        """Log and store the first sample, and the first one with another outcome if there is one."""
        others = [sample for sample in samples if sample.outcome is not samples[0].outcome]
        shown = [samples[0], *others[:1]]
        self._samples.append(shown)
        for sample in shown:
            self._say(line(sample))


def line(sample: SampledCompletion) -> str:
    """Format a sample as one line of at most 120 characters; texts that are too long lose their middle.

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
    """Quote a text in at most `room` characters, quotes included: of a longer one keep its start and its end, where the
    final answer is.

    >>> _short("3+8=11", 20), _short("three and eight are eleven", 20)
    ("'3+8=11'", "'three a ... eleven'")
    """
    shown, kept = repr(text[: room + 1]), min(len(text), room)
    while len(shown) > room and kept > 0:
        kept -= 1
        shown = repr(f"{text[: kept - kept // 2]} ... {text[len(text) - kept // 2 :]}")
    return shown


class SlowReward:
    """Detects that the reward is the bottleneck: its workers are busy all the time, and no engine is.

    Args:
        name: name of the reward in the recipe.
        workers: number of its workers, for the message.
    """

    def __init__(self, name: str, workers: int) -> None:
        self.name, self.workers = name, workers
        self.found = ""  #: the reward's name while it is the bottleneck, else ""
        self._told = False
        # (time, busy seconds of the rewards, of each engine)
        self._seen: deque[tuple[float, float, Mapping[str, float]]] = deque()

    def poll(self, now: float, seconds: Mapping[str, float]) -> str | None:
        """Compare the busy shares of rewards and of the busiest engine over the last 10 seconds. Set `found` to the
        reward's name while its workers are busy 90% of the time or more, and the engine less than 0.9 times as much;
        else to "". Call it every second; the first 10 seconds change nothing.

        Args:
            now: time in seconds, of any clock.
            seconds: busy seconds so far by role; those of "rewards" are the mean over its workers.

        Returns:
            A log line, the first time the reward is too slow; else None.
        """
        engines = {role: worked for role, worked in seconds.items() if role.startswith("engine")}
        self._seen.append((now, seconds.get("rewards", 0.0), engines))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()
        (since, judged_then, then), (_, judged, _) = self._seen[0], self._seen[-1]
        if now - since < WINDOW:
            return None
        busiest = max((worked - then.get(role, 0.0) for role, worked in engines.items()), default=0.0)
        judging, generating = (judged - judged_then) / (now - since), busiest / (now - since)
        self.found = self.name if judging >= _SATURATED and generating < _SATURATED * judging else ""
        if not self.found or self._told:
            return None
        self._told = True
        return (
            f"the reward {self.name!r} is slower than generation: its workers are busy {min(1.0, judging):.0%} of the "
            f"time, the busiest engine {min(1.0, generating):.0%}; rewards.workers = {self.workers} may be too few"
        )
