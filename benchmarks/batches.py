"""What a rank does to a batch before its first product: CPU seconds and bytes for a million tokens.

    python -m benchmarks.batches

Each rank has the whole batch: it reads it (MessagePack), computes the advantages and packs its own share. Bytes are the
most that Python's and numpy's allocators hold at once beyond what is there before (tracemalloc, in a pass of its own).
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from benchmarks.gpu_training import ALGORITHM
from benchmarks.lengths import batch
from benchmarks.report import Table, save
from stretto.core.records import Batch
from stretto.trainer.batch.minibatch import Minibatch, minibatch
from stretto.trainer.batch.packing import minibatches
from stretto.trainer.batch.samples import SampledBatch, samples_of
from stretto.trainer.config import TrainerConfig
from stretto.trainer.messages import TO_RANK, Train

MILLION = 1e6
PROMPT, ANSWER, GROUP = 128, 2048, 8


def packed(sampled: SampledBatch, parts: int) -> list[Minibatch]:
    """The minibatches of the only rank, on the processor, without shared prompts as on a GPU."""
    samples, config = sampled.samples, TrainerConfig(micro_batch_tokens=32_768, minibatches=parts)
    divided = minibatches([len(sample.token_ids) for sample in samples], parts)
    aggregation, device = ALGORITHM.aggregation, torch.device("cpu")
    return [minibatch([samples[i] for i in part], config, aggregation, ANSWER, device) for part in divided]


def cost(work: Callable[[], Any], tokens: int, passes: int = 3) -> dict[str, float]:
    """For a million tokens: the least CPU seconds of some passes, and the most bytes of one more."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help=f"of {GROUP} answers of {ANSWER} tokens")
    words = parser.parse_args()
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
