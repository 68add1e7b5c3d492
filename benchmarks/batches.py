"""What a rank does to a batch before its first matmul: CPU seconds and bytes for a million tokens.

    python -m benchmarks.batches
    python -m benchmarks.batches --paper [--shares 48]

Each rank gets the whole batch: it decodes it (MessagePack), computes the advantages and packs its own share. Bytes are
the peak of Python's and numpy's allocators above their level before (tracemalloc, in a separate pass).

--paper: one batch of the paper's size, 512 groups of 16 completions of at most 27,648 tokens (log-normal, mean 10,820),
once through every station: the ledger's file, the order of rank 0, the message as a rank reads it, samples, and the
share of one of `--shares` ranks as micro-batches. Bytes are the growth of the process's peak memory (VmHWM). Nothing is
saved.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.gpu_training import ALGORITHM
from benchmarks.lengths import batch
from benchmarks.report import Table, save
from stretto.core.frames import LENGTH, frame
from stretto.core.records import Batch, Group, Outcome, Prompt, Segment, StopReason, Trajectory, Verdict, trajectory_id
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.ledger.reading import read_batches
from stretto.trainer.batch.minibatch import Minibatch, minibatch, minibatches
from stretto.trainer.batch.samples import SampledBatch, samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import Train
from stretto.trainer.ranks import Ranks
from stretto_cluster.ranks.messages import TO_RANK
from tests.trainer.unloaded import resident

MILLION = 1e6
PROMPT, ANSWER, GROUP = 128, 2048, 8
SAMPLES, LONGEST, MEAN, SIGMA = 16, 27_648, 12_450.0, 0.9  # the paper's; the mean before the cut


class Share(Ranks):
    """Stand-in for the first of `shares` ranks, without the others: packing asks only for their number."""

    def __init__(self, shares: int) -> None:
        self.shares = shares


def packed(sampled: SampledBatch, parts: int, shares: int = 1) -> list[Minibatch]:
    """Divide a batch into `parts` minibatches, and pack each for the first of `shares` ranks, on the CPU."""
    samples, config = sampled.samples, TrainerConfig(micro_batch_tokens=32_768, minibatches=parts)
    divided = minibatches([len(sample.token_ids) for sample in samples], parts)
    aggregation, device = ALGORITHM.aggregation, torch.device("cpu")
    each = partial(minibatch, config=config, aggregation=aggregation, longest=ANSWER, device=device)
    return [each([samples[i] for i in part], ranks=Share(shares)) for part in divided]


def cost(work: Callable[[], Any], tokens: int, passes: int = 3) -> dict[str, float]:
    """Least CPU seconds of `passes` calls of `work`, and most bytes of memory during one more call, each for a million
    of its `tokens`."""
    seconds = []
    for _ in range(passes):
        gc.collect()
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    gc.collect()
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "cpu_seconds": round(min(seconds) * MILLION / tokens, 4),
        "megabytes": round(peak / MILLION * MILLION / tokens, 1),
    }


def lengths(groups: int) -> list[tuple[int, ...]]:
    """Draw the numbers of tokens of the completions of each group."""
    drawn = np.random.default_rng(1)
    center = math.log(MEAN) - SIGMA**2 / 2
    return [tuple(drawn.lognormal(center, SIGMA, SAMPLES).clip(1, LONGEST).astype(int).tolist()) for _ in range(groups)]


def batch_of(groups: int) -> Batch:
    """Make a batch with the paper's lengths. The tokens themselves do not matter."""
    ids = np.random.default_rng(2).integers(2, 151_936, LONGEST, dtype=np.int32)
    logprobs = np.linspace(-8, -6, LONGEST, dtype=np.float32)

    def made(group: int, member: int, length: int) -> Trajectory:
        columns = ids[:length].tobytes() + logprobs[:length].tobytes()
        segment = Segment.sealed(columns, length, ((1, length),), stop_reason=StopReason.STOP)
        verdict = Verdict(outcome=Outcome.RIGHT, reward=float(member % 2))
        return Trajectory(id=trajectory_id(str(group), member), segments=(segment,), verdict=verdict, text="")

    prompt = Prompt(id="0", token_ids=tuple(ids[:PROMPT].tolist()), text="", answer="")
    found = [
        Group(str(g), prompt, 1, tuple(made(g, m, length) for m, length in enumerate(own)))
        for g, own in enumerate(lengths(groups))
    ]
    return Batch(step=1, version=1, groups=tuple(found))


def station(table: Table, name: str, work: Callable[[], Any]) -> Any:
    """Do the work once, add its row to the table, and return its result."""
    gc.collect()
    before, began, wall = resident("VmRSS"), time.process_time(), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    result = work()
    seconds, passed = time.process_time() - began, time.perf_counter() - wall
    table.add(name, f"{seconds:.1f}", f"{passed:.1f}", f"{(resident('VmHWM') - before) / 2**30:.2f}")
    table.show_last()
    return result


def paper(groups: int, shares: int) -> None:
    """Pass one batch through every station."""
    made = batch_of(groups)
    tokens = sum(t.segments[0].length for group in made.groups for t in group.trajectories)
    print(f"{groups * SAMPLES:,} completions, {tokens:,} tokens")
    table = Table("station", "CPU s", "s", "GiB more")
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        path = Path(folder) / "ledger.sqlite"
        station(table, "into the ledger", partial(write, path, made))
        station(table, "out of the ledger", partial(list, read_batches(path, 0, 1)))
    sent = station(table, "order", partial(frame, Train(batch=made)))
    print(f"order: {len(sent) / 2**30:.2f} GiB")
    made = station(table, "read by a rank", partial(TO_RANK.decode, memoryview(sent)[LENGTH.size :])).batch
    sampled = station(table, "samples", partial(samples_of, made, ALGORITHM, LONGEST))
    station(table, "minibatches", partial(packed, sampled, 4, shares))


def write(path: Path, made: Batch) -> None:
    """Write the batch to the ledger as the conductor does, from admission to training."""
    with closing(Ledger(path, StoreConfig())) as ledger:
        for group in made.groups:
            ledger.issue(group.id, group.prompt, len(group.trajectories), group.admitted_version)
            ledger.buffer(group)
        ledger.commit_batch(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help=f"of {GROUP} answers of {ANSWER} tokens")
    parser.add_argument("--paper", nargs="?", type=int, const=512, help="its batch, of so many groups")
    parser.add_argument("--shares", type=int, default=48, help="of a minibatch, of which one is packed")
    words = parser.parse_args()
    if words.paper:
        paper(words.paper, words.shares)
        return
    made: Batch = batch([(PROMPT, (ANSWER,) * GROUP)] * words.groups, 151_936, 1)
    tokens = words.groups * GROUP * ANSWER
    sent = msgspec.msgpack.encode(Train(batch=made))
    sampled = samples_of(made, ALGORITHM, ANSWER)
    parts: dict[str, Callable[[], Any]] = {
        "read": lambda: TO_RANK.decode(sent),
        "samples": lambda: samples_of(made, ALGORITHM, ANSWER),
        "packed": lambda: packed(sampled, 4),
    }
    table, rows = Table("part", "CPU s a million tokens", "MB a million tokens"), []
    for name, work in parts.items():
        rows.append({"part": name} | cost(work, tokens))
        table.add(name, rows[-1]["cpu_seconds"], rows[-1]["megabytes"])
        table.show_last()
    save("batches", {"tokens": tokens, "rows": rows})


if __name__ == "__main__":
    main()
