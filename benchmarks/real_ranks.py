"""Memory and losses of real ranks on gloo, compared with the numbers that are computed without machines.

    python -m benchmarks.real_ranks [--folder FOLDER]

1, 2, 4 and 8 processes train a model of 22M parameters, two steps of 8 sequences of 128 tokens each. Memory is the
peak of a rank in the second step, above that of its process before it has the model. The computed number is that of
`tests.trainer.scale.counting`, with the copies that gloo makes of the data that it gathers and sums. `--folder` has
results of earlier processes; missing ones are run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Table, save
from tests.trainer.scale.counting import step_bytes
from tests.trainer.scale.real_ranks import SEQUENCES, SETTINGS, SHAPE, SMALL, TOKENS

COUNTS = (1, 2, 4, 8)


def played(folder: Path, count: int) -> list[dict[str, Any]]:
    """Results of every rank of a run with `count` of them."""
    files = [folder / f"{count}-{rank}.pt" for rank in range(count)]
    if not all(file.exists() for file in files):
        words = [sys.executable, "-m", "tests.trainer.scale.real_ranks", str(folder), str(count)]
        subprocess.run(words, check=True)
    return [torch.load(file) for file in files]


def measured(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    table = Table("ranks", "counted MiB", "measured MiB", "measured / counted", "losses from one rank's")
    losses = played(folder, 1)[0]["losses"]
    for count in COUNTS:
        seen = played(folder, count)
        counted = step_bytes(SHAPE, {**SETTINGS, "ranks": count}, TOKENS, micro_batches=SEQUENCES // count, gpu=False)
        peaks = [one["peak"] for one in seen]
        apart = max(abs(a - b) for one in seen for a, b in zip(one["losses"], losses, strict=True))
        rows.append({"ranks": count, "counted": counted.peak, "peaks": peaks, "loss_difference": apart})
        most = max(peaks)
        cells = f"{counted.peak / 2**20:.0f}", f"{most / 2**20:.0f}", f"{most / counted.peak:.3f}", f"{apart:.1e}"
        table.add(count, *cells)
        table.show_last()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as made:
        folder = words.folder or Path(made)
        torch.manual_seed(1)
        for name, shape in (("model", SHAPE), ("small", SMALL)):
            if not (folder / name).exists():
                AutoModelForCausalLM.from_config(shape).save_pretrained(folder / name)
        save("real-ranks", {"sequences": SEQUENCES, "tokens": TOKENS, "rows": measured(folder)})


if __name__ == "__main__":
    main()
