"""The paper's numbers predicted (AReaL, arXiv 2505.24298), and verl's published asynchronous steps; simulated.

    python -m benchmarks.paper_predictions [--parts table_1 ideas ...]

Hours of table 1, the split of section 7.1, throughput against staleness (table 2, figure 5c) and against devices
(figure 4). The machine is the profile `h100`: an H800 has its arithmetic and memory. Of the paper, figures 6a and 6b
were used to fit the profile. Lengths are not in the paper: the mean of 9,700 tokens is that of its figure 5c times
table 1 at 1.5B (371,700 tokens/s for 213 s, over 8,192 completions), so the row of 1.5B is not independent; the
others have the same lengths. verl's rows (its page of the fully asynchronous trainer: Qwen2.5-Math-7B, H20, 512
prompts of 16 answers) have a mean length fitted to the first row; the other two are predicted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import RESULTS, Table, save
from stretto_app.extensions.commands.plan import job_of
from stretto_foresight.planner.costs import Costs, Job, Layout
from stretto_foresight.planner.layouts import candidate
from stretto_foresight.planner.lengths import LogNormalLengths
from stretto_foresight.planner.machine import MachineProfile, machine_of
from stretto_foresight.planner.predict import LayoutPrediction, predict

RECIPES = Path(__file__).resolve().parent.parent / "recipes" / "paper"
MEAN, SIGMA, LONGEST, PROMPT = 10_820.0, 0.9, 27_648, 300  # 9,700 once cut off at the longest
TABLE_1 = (  # recipe, nodes, tensor, steps, staleness, hours
    ("math_1.5b", 16, 1, 250, 8, 14.8),
    ("math_7b", 24, 1, 250, 8, 25.4),
    ("code_14b", 32, 2, 80, 4, 21.9),
    ("math_32b", 48, 4, 60, 4, 31.1),
)
FIGURE_5C = {0: 128.7, 1: 269.3, 2: 356.6, 4: 356.6, 8: 371.7, 16: 382.4, math.inf: 396.8}  # thousand tokens/s
FIGURE_4 = {"math_1.5b": (1, (32, 64, 128, 256)), "math_7b": (1, (64, 128, 256, 512)), "math_32b": (4, (256, 512))}
_WORKERS = 8  # of the recipes' rewards; this machine, which checks the recipes, may carry fewer
_LONGER = LogNormalLengths(2 * MEAN, SIGMA, LONGEST, PROMPT)  # 15,800 tokens once cut off
SPLITS = (2, 3, 4, 5, 6, 8)  # sixteenths of the devices that train
VERL = ((16, 16, 294.77), (32, 32, 189.26), (64, 64, 150.63))  # devices that generate and train, seconds of a step


def at(
    job: Job, machine: MachineProfile, devices: int, tensor: int, staleness: float, share: float = 0.25
) -> LayoutPrediction:
    """Predict a run on `devices` devices, of which this share trains."""
    ranks = round(devices * share)
    layout = Layout((devices - ranks) // tensor, ranks, tensor)
    one = candidate(job, machine, layout, staleness, job.trainer.micro_batch_tokens)
    return predict(one.job, machine, one.layout)


def jobs() -> dict[str, Job]:
    """The paper's runs by name, with the lengths assumed here."""
    lengths = LogNormalLengths(MEAN, SIGMA, LONGEST, PROMPT)
    found = {
        row[0]: job_of(RECIPES / f"{row[0]}.toml", ["rewards.workers=1"], None, lambda text: None) for row in TABLE_1
    }
    return {name: replace(job, lengths=lengths, reward_workers=_WORKERS) for name, job in found.items()}


def table_1(known: dict[str, Job], machine: MachineProfile) -> list[dict[str, Any]]:
    rows, table = [], Table("recipe", "nodes", "steps", "paper h", "predicted h", "error", "waits for")
    for name, nodes, tensor, steps, staleness, hours in TABLE_1:
        job = known[name].with_settings({}, {}, {"steps": steps})
        found = at(job, machine, 8 * nodes, tensor, staleness)
        rows.append({"recipe": name, "nodes": nodes, "hours": hours, "predicted": found.hours, "busy": found.busy})
        rows[-1]["error"] = found.hours / hours - 1
        rows[-1]["busy"] = {"engines": found.busy["engine-0"], "trainer": found.busy["trainer"]}
        rows[-1]["staleness"] = msgspec.to_builtins(found.staleness)
        table.add(name, nodes, steps, hours, f"{found.hours:.1f}", f"{rows[-1]['error']:+.0%}", found.waits_for)
        table.show_last()
    return rows


def ideas(known: dict[str, Job], machine: MachineProfile) -> list[dict[str, Any]]:
    """Changes that could make 14B and 32B take as long as in the paper: each alone, none of them fitted."""
    replaced = msgspec.structs.replace
    slow_links = replaced(machine, network_bandwidth=machine.network_bandwidth / 4)
    each: dict[str, Callable[[Job], tuple[Job, MachineProfile]]] = {
        "as planned": lambda job: (job, machine),
        "completions twice as long before the cut": lambda job: (replace(job, lengths=_LONGER), machine),
        "a quarter of the network": lambda job: (job, slow_links),
        "half of the memory for the cache": lambda job: (job, replaced(machine, memory_gib=machine.memory_gib / 2)),
        "the KV cache read at a third of the data sheet's rate": lambda job: (
            job,
            replaced(machine, cache_bandwidth=1.1e12),
        ),
        "training at 388 TFLOP/s (figure 6a, 32B)": lambda job: (job, replaced(machine, train_flops=3.877e14)),
        "a second to judge each program": lambda job: (job, replaced(machine, judge_seconds=1.0)),
        "micro-batches of one longest sequence": lambda job: (
            job.with_settings({}, {}, {"micro_batch_tokens": job.longest}),
            machine,
        ),
    }
    rows, table = [], Table("recipe", "idea", "paper h", "predicted h", "error", "gen busy", "train busy")
    for name, nodes, tensor, steps, staleness, hours in TABLE_1[2:]:
        for idea, change in each.items():
            job, changed = change(known[name].with_settings({}, {}, {"steps": steps}))
            found = at(job, changed, 8 * nodes, tensor, staleness)
            error, busy = found.hours / hours - 1, (found.busy["engine-0"], found.busy["trainer"])
            rows.append({"recipe": name, "idea": idea, "predicted": found.hours, "error": error, "busy": busy})
            table.add(name, idea, hours, f"{found.hours:.1f}", f"{error:+.0%}", *(f"{share:.0%}" for share in busy))
            table.show_last()
    return rows


def splits(known: dict[str, Job], machine: MachineProfile) -> list[dict[str, Any]]:
    """Step time of 1.5B and 7B by the share of devices that train. (The paper found a quarter best.)"""
    rows, table = [], Table("recipe", "share that trains", "step s")
    for name, nodes in (("math_1.5b", 16), ("math_7b", 24)):
        for part in SPLITS:
            found = at(known[name], machine, 8 * nodes, 1, 8, part / 16)
            rows.append({"recipe": name, "share": part / 16, "step_seconds": found.step_seconds})
            table.add(name, part / 16, f"{found.step_seconds:.0f}")
            table.show_last()
    return rows


def by_staleness(known: dict[str, Job], machine: MachineProfile) -> list[dict[str, Any]]:
    rows, table = [], Table("max_staleness", "paper k tokens/s", "predicted", "error", "mean staleness")
    for bound, paper in FIGURE_5C.items():
        found = at(known["math_1.5b"], machine, 128, 1, bound)
        error = found.tokens_per_second / paper / 1000 - 1
        rows.append({"max_staleness": str(bound), "paper": paper, "predicted": found.tokens_per_second, "error": error})
        numbers = (f"{found.tokens_per_second / 1000:.1f}", f"{error:+.0%}", found.staleness.mean)
        table.add(bound, paper, *numbers)
        table.show_last()
    return rows


def by_devices(known: dict[str, Job], machine: MachineProfile) -> list[dict[str, Any]]:
    """Tokens per second by number of devices, and the share of linear scaling from the smallest number."""
    rows, table = [], Table("recipe", "devices", "tokens/s", "of linear")
    for name, (tensor, numbers) in FIGURE_4.items():
        first = 0.0
        for devices in numbers:
            found = at(known[name], machine, devices, tensor, 8)
            each = found.tokens_per_second / devices
            first = first or each
            row = {"recipe": name, "devices": devices, "tokens_per_second": found.tokens_per_second}
            rows.append(row | {"linear": each / first})
            table.add(name, devices, f"{found.tokens_per_second:,.0f}", f"{each / first:.2f}")
            table.show_last()
    return rows


def verl(known: dict[str, Job]) -> list[dict[str, Any]]:
    """Steps of verl's asynchronous trainer, half a batch ahead: one version of staleness."""
    machine, rows, table = machine_of("h20"), [], Table("generate", "train", "verl s", "predicted s", "error")
    job = known["math_7b"].with_settings({"max_staleness": 1.0}, {}, {"minibatches": 16, "steps": 400})
    mean = _fitted(job, machine, VERL[0][2])
    for generate, train, seconds in VERL:
        one = replace(job, lengths=LogNormalLengths(mean, SIGMA, LONGEST, PROMPT))
        found = at(one, machine, generate + train, 1, 1, train / (generate + train))
        error = found.step_seconds / seconds - 1
        rows.append({"devices": generate + train, "verl": seconds, "predicted": found.step_seconds, "error": error})
        table.add(generate, train, seconds, f"{found.step_seconds:.0f}", f"{error:+.0%}")
        table.show_last()
    return [{"fitted_mean_length": mean}, *rows]


def _fitted(job: Job, machine: MachineProfile, seconds: float) -> float:
    """Mean length at which training, for which the step waits, takes `seconds`."""
    costs = Costs(job, machine, Layout(16, 16))
    shortest, longest = 100.0, float(LONGEST)
    for _ in range(40):
        middle = (shortest + longest) / 2
        if costs.train([PROMPT + round(middle)] * job.completions) < seconds:
            shortest = middle
        else:
            longest = middle
    return shortest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"table_1": table_1, "ideas": ideas, "staleness": by_staleness, "splits": splits, "devices": by_devices}
    parser.add_argument("--parts", nargs="+", choices=[*parts, "verl"], default=[*parts, "verl"])
    asked = parser.parse_args().parts
    known, machine = jobs(), machine_of("h100")
    path = RESULTS / "paper-predictions.json"
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    results["lengths"] = {"mean": MEAN, "sigma": SIGMA, "longest": LONGEST}
    for name in asked:
        results[name] = parts[name](known, machine) if name in parts else verl(known)
        save("paper-predictions", results)


if __name__ == "__main__":
    main()
