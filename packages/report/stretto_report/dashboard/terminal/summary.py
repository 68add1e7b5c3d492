"""Summary table of a run, shown at its end and by ``stretto inspect``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import UNSET
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from stretto.core.errors import RunFolderError, StoreError, several
from stretto.store.inspection import CanaryProof, EngineRecord, Inspection, WeightsSummary
from stretto.store.run_folder import RunFolder
from stretto.store.selection import SIGNIFICANT
from stretto.store.series.metrics import EvaluationLine, alike, read_evaluations
from stretto.store.totals import EXPIRED, IDLE, MASKED, RECOMPUTED, TRAINED
from stretto_report.dashboard.prediction import PredictedRun, predicted_beside_measured
from stretto_report.dashboard.terminal.characters import cell, words
from stretto_report.reading.inspection import inspect_run, role_times

_BAR_WIDTH, _LEFT = 24, 8
_CHANGES = 3  # newest changes of bounds that are shown
_SHOWN, _SHOWN_SHARE = 0.05, 0.005  # least seconds, and least share of the training, that are shown
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LARGE = 0.1  # share of all tokens from which lost tokens are shown with the recipe keys that limit them
_KEYS = {
    MASKED: "rollout.max_staleness, rollout.max_in_flight",
    EXPIRED: "rollout.max_staleness, rollout.max_in_flight",
    RECOMPUTED: "engine.load_interval, engine.on_update",
}


def print_inspection(
    path: str | Path,
    as_json: bool = False,
    also: Mapping[str, object] | None = None,
    predicted: Path | None = None,
) -> None:
    """Print the summary of the run in the folder `path` to standard output, as a table or (`as_json`) as one JSON
    object with the further fields `also`. If there is a prediction, in the file `predicted` or (None) in the run
    folder, it is compared with the run. A prediction of the folder that does not fit (after a resume) is skipped; the
    table ends with the reason, and the object has it as `not_predicted`.

    Raises:
        RunFolderError: there is no run, or `predicted` is no prediction of it.
        StoreError: the run's ledger cannot be read.
    """
    inspection, passed_over = inspect_run(path), ""
    try:
        comparison = predicted_beside_measured(path, predicted)
    except RunFolderError as error:
        if predicted is not None:
            raise
        comparison, passed_over = None, f"not compared with its prediction: {error}"
    if as_json:
        known = {name: value for name, value in msgspec.structs.asdict(inspection).items() if value is not UNSET}
        told = {
            **known,
            "predicted": comparison,
            "not_predicted": passed_over,
            **(also or {}),
        }
        sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
        return
    sets = dict[str, list[EvaluationLine]]()
    with suppress(OSError, StoreError):  # a damaged line is named by `stretto check`
        sets = read_evaluations(RunFolder.open(path).metrics)
    Console().print(summary_table(inspection, str(path), sets))
    if comparison is not None:
        Console().print(Group(*comparison_lines(comparison)))
    elif passed_over:
        Console().print(words(passed_over))


def comparison_lines(comparison: PredictedRun) -> list[RenderableType]:
    """Return lines for a terminal: the machine of the prediction, and the run's if it is another; a table with a row
    for each term; and the term that explains most of the error, if there is one."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("", "predicted", "measured", "ratio"):
        table.add_column(head, justify="right")
    for name, term in comparison.terms.items():
        shown = (name.replace("_", " "), f"{term.predicted:,.4g}", f"{term.measured:,.4g}")
        ratio = "" if term.ratio is None else f"{term.ratio:.2f}"
        table.add_row(*map(cell, (*shown, ratio)), style="bold red" if name == comparison.most_off else "")
    found: list[RenderableType] = [words(f"predicted for {comparison.machine}", "bold")]
    if comparison.other_machine:
        said = f"the run was on another machine, {comparison.other_machine}: the seconds are not comparable"
        found.append(words(said, "bold red"))
    found.append(table)
    if most := comparison.most_off:
        of = {"staleness": "{:+.2f} versions", "completion_tokens": "{:+.0%}"}.get(most, "{:+.0%} of a step")
        found.append(words(f"most off: {most.replace('_', ' ')}, {of.format(comparison.terms[most].off)}"))
    return found


def summary_table(
    inspection: Inspection, title: str, sets: Mapping[str, Sequence[EvaluationLine]] | None = None
) -> Table:
    """Make the table of a run with one row for each value: state, accuracy and time, work, staleness, busy roles,
    goodput, engines, weights and canary. Values that the run does not have are left out. Of the engines that have left,
    the last eight have rows of their own. `sets`: evaluations by set of questions, as of `read_evaluations`: each
    further set has a row with its newest accuracy, and the first that may be compared with it."""
    table = Table(title=words(title, "bold"), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim", justify="right")
    table.add_column()
    left = sorted((one for one in inspection.engines if one.left_step is not None), key=lambda one: one.left_step or 0)
    hidden = {one.name for one in left[:-_LEFT]}
    proofs = [one for one in inspection.canary_proofs if one.which != "newest" or one.engine not in hidden]
    engines, weights = _engines(inspection.engines, hidden), _weights(inspection.weights)
    for section in (
        _state(inspection),
        _accuracy(inspection, sets or {}),
        _work(inspection),
        _staleness(inspection),
        _in_flight(inspection),
        _busy(inspection.busy, hidden),
        _goodput(inspection, hidden),
        (*engines, *weights, *canary_rows(proofs)),
    ):
        for name, value in section:
            table.add_row(cell(name), cell(value))
        table.add_row("", "")
    return table


Rows = Iterable[tuple[str, str | Text]]


def _state(inspection: Inspection) -> Rows:
    if inspection.state:
        yield "state", f"{inspection.state}: {inspection.reason}" if inspection.reason else inspection.state
    for key, change in inspection.replay.changes.items() if inspection.replay else ():
        yield "changed", f"{key} {change}"
    for sentence in inspection.changed:
        yield "changed", sentence


def _accuracy(inspection: Inspection, sets: Mapping[str, Sequence[EvaluationLine]]) -> Rows:
    before, after = _percent(inspection.initial_accuracy), _percent(inspection.final_accuracy)
    yield "held-out accuracy", Text.assemble(before, " → ", (after, "bold green"))
    for name, lines in sets.items():
        if name:
            before, after = _percent(alike(lines)[0].known), _percent(lines[-1].known)
            yield f"accuracy of {name}", f"{before} → {after}"
    for name, value in inspection.rewards.items():
        yield name, f"{value:.3f} on average in the last batch"
    yield "steps", f"{inspection.steps:,} (version {inspection.version})"
    yield "time", f"{inspection.rl_seconds:.1f} s of RL, {inspection.wall_seconds:.1f} s in all"


def _work(inspection: Inspection) -> Rows:
    counts, tokens, seconds = inspection.trajectories, inspection.tokens, inspection.rl_seconds
    parts = [
        f"{count:,} {name}"
        for name, count in (
            ("trained", counts.trained),
            ("buffered", counts.buffered),
            ("in flight", counts.in_flight),
            ("filtered", counts.filtered),
            ("expired", counts.expired),
            ("failed", counts.failed),
        )
        if count
    ]
    yield "trajectories", f"{counts.issued:,} = {' + '.join(parts) or 'none'}"
    if counts.undecided:
        why = f", most often: {counts.undecided_reason}" if counts.undecided_reason else ""
        yield "undecided", f"{counts.undecided:,} of the {counts.failed:,} failed{why}"
    if inspection.replay is None:  # `seconds` of a branch are those of its own steps
        yield "", f"{counts.trained / seconds:,.0f} trained a second" if seconds else "none trained yet"
    yield "tokens", f"{tokens.generated:,} generated, {tokens.trained:,} trained"
    yield "", f"{tokens.recomputed:,} recomputed, {tokens.wasted:,} wasted"


def _changes(inspection: Inspection, name: str) -> Rows:
    for change in [change for change in inspection.bounds if change.name == name][-_CHANGES:]:
        yield "", f"{change.name} {change.before} to {change.after} after step {change.step}: {change.reason}"


def _in_flight(inspection: Inspection) -> Rows:
    if newest := [change.after for change in inspection.bounds if change.name == "max_in_flight"]:
        yield "groups in flight", f"{newest[-1]} at most, after {several(len(newest), 'change')}"
        yield from _changes(inspection, "max_in_flight")


def _staleness(inspection: Inspection) -> Rows:
    staleness = inspection.staleness
    bound = "none" if staleness.bound is None else f"{staleness.bound:g}"
    yield "staleness", f"mean {staleness.mean:.2f}, largest {staleness.max}, bound {bound}"
    yield from _changes(inspection, "max_staleness")
    tokens = sum(staleness.histogram.values())
    for age, count in list(staleness.histogram.items())[:12]:
        yield f"{age}", Text.assemble((bar(count / tokens), "cyan"), f" {count / tokens:.1%}")
    yield (
        "interrupted",
        f"{several(inspection.interrupted, 'completion')}; "
        f"{inspection.multi_version:,} {'has' if inspection.multi_version == 1 else 'have'} tokens of several versions",
    )


def _busy(busy: Mapping[str, float], hidden: Collection[str]) -> Rows:
    for role, fraction in busy.items():
        if role not in hidden:
            yield f"{role} busy", Text.assemble((bar(fraction), "blue"), f" {fraction:.0%}")


def _goodput(inspection: Inspection, hidden: Collection[str]) -> Rows:
    budget = inspection.goodput
    tokens = max(1, sum(one.tokens for one in budget.values()))
    for name, one in budget.items():
        if name != IDLE and (one.tokens or one.seconds):
            share = one.tokens / tokens
            shown = f"{several(one.tokens, 'token')} ({share:.1%}), {one.seconds:,.1f} s"
            yield name.replace("_", " "), shown
            if share >= _LARGE and name in _KEYS:
                yield "", f"bounded by {_KEYS[name]}"
    yield from _cores(inspection)
    for name, bias in inspection.selection_bias.items():
        if bias.p < 1:
            found = f"{name} {bias.statistic:+.2f}, p = {bias.p:.1g}"
            yield "selection bias", words(found, "bold red" if bias.p < SIGNIFICANT else "")
    if inspection.masked_groups is not None:
        yield "masked in part", str(inspection.masked_groups)
    for time in role_times(inspection.goodput_roles, inspection.idle):
        waits = sorted(time.waiting.items(), key=lambda wait: -wait[1])
        parts = [f"{reason} {share:.0%}" for reason, share in waits if share >= _SHOWN_SHARE]
        parts += [f"{reason} {spell:,.1f} s" for reason, spell in time.outside.items() if spell >= _SHOWN]
        if time.working is not None and parts and time.role not in hidden:
            yield f"{time.role}", f"{time.working:.0%} of the training at work; {', '.join(parts)}"


def _cores(inspection: Inspection) -> Rows:
    """Yield what the run's cores did, if it is on record: trained tokens, then the other parts, the largest first,
    without tiny ones."""
    cores = inspection.cores or {}
    whole = sum(cores.values())
    uses = sorted(cores, key=lambda use: (use != TRAINED, -cores[use]))
    shown = [f"{use.replace('_', ' ')} {cores[use] / whole:.1%}" for use in uses if cores[use] >= _SHOWN_SHARE * whole]
    if shown:
        yield "cores", f"{whole:,.1f} s of their time: {', '.join(shown)}"


def _engines(engines: Sequence[EngineRecord], hidden: Collection[str]) -> Rows:
    """Yield one row for all engines whose names are in `hidden`, if any, and one for each other engine."""
    if hidden:
        tokens = sum(engine.generated for engine in engines if engine.name in hidden)
        left = f"that have left before, {several(tokens, 'token')}: each one is in `inspect --json`"
        yield several(len(hidden), "engine"), left
    for engine in engines:
        if engine.name in hidden:
            continue
        there = f"since step {engine.joined_step}"
        if engine.left_step is not None:
            there = f"steps {engine.joined_step} to {engine.left_step}: {engine.reason}"
        what = f"{engine.kind} on {engine.host}, version {engine.version}"
        yield engine.name, f"{what}, {several(engine.generated, 'token')}, {there}"


def _weights(weights: WeightsSummary) -> Rows:
    if weights.bytes is None or weights.seconds_pull_median is None:
        return
    pull = f"{weights.bytes / 1e6:,.1f} MB in {1000 * weights.seconds_pull_median:,.1f} ms"
    pause = weights.seconds_pause_median
    parts = [f"{weights.medium}: {pull}", *([f"pause {1000 * pause:,.1f} ms"] if pause is not None else [])]
    if weights.copies is not None and weights.seconds_publish_median is not None:
        parts.append(f"{weights.copies:g} copies before, written in {1000 * weights.seconds_publish_median:,.1f} ms")
    yield "weights", ", ".join(parts)


def canary_rows(proofs: Iterable[CanaryProof]) -> Iterator[tuple[str, str]]:
    """Yield one row (label, text) for each canary check: engine, version, difference and tolerance."""
    for proof in proofs:
        found = f"version {proof.version}, {proof.distance:.1e} nats from the trainer, {proof.tolerance:.1e} allowed"
        verdict = "proven" if proof.proven else "NOT proven"
        yield f"canary, {proof.which}", f"{proof.engine} {verdict}: {found}"


def bar(fraction: float, width: int = _BAR_WIDTH) -> str:
    """Draw a fraction (below 0 as 0, above 1 as 1) as a bar of block characters, padded with spaces to `width`.

    >>> bar(0.5, width=4), bar(0.3125, width=4)
    ('██  ', '█▎  ')
    """
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    whole, part = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[part] if part else "")).ljust(width)


def _percent(fraction: float | None) -> str:
    return "not measured" if fraction is None else f"{fraction:.1%}"
