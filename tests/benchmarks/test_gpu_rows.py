"""Promises: the page shows what was measured on a GPU, part by part, under the name of the GPU; what failed, was
skipped or is not there is a missed goal; a part without results is no row."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, summary
from benchmarks.gpu_rows import PARTS, SECTION, lacking

GPU: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/gpu.json").read_text(encoding="utf-8"))
MACHINE = {"processor": "a processor", "cores": 16, "memory_gib": 125.0, "accelerators": ["H100 80GB, 81559 MiB"]}


def test_each_part_has_rows_and_ratios() -> None:
    rows = "\n".join(map(str, SECTION["gpu"](GPU)))
    for told in (
        "32 × 1,024 tokens | 5,000 | weights and cache read once at 3,000 GB/s | 25 % |",
        "answers of 64 tokens, 1, 32 sequences | 200, 5,000 | transformers `generate`: 40, 1,000 | × 5.0, 5.0 |",
        "32 sequences | 5,000 | transformers `generate`, static cache, compiled: 2,500 | × 2.0 |",
        "30,000, 20 GiB | the same step with rows of transformers: 20,000, 40 GiB | × 1.5 |",
        "| 0.910 after 40 s of reinforcement, 200 steps | 0.42 before |",
        "| 50 ms | read beside the work in 400 ms |",
        "with its gradient: ms | 2.000 | torch alone: 3.000 | × 1.5 |",
        "| 49.0 GiB | the estimate of `--dry-run`: 50.0 GiB | 98% of it |",
        "| 0.32 s, the copy 0.01 s, the writing 0.40 s | alone: 0.30 s | × 0.94 |",
        "top-k and top-p: ms | 0.500 | torch alone: 1.000 | × 2.0 |",
        "| 40 passed in 20.00s |",
    ):
        assert told in rows
    assert "generate_batch" not in rows, "it was skipped"
    assert "16 × 512 tokens | 30,000 | the peak of 989 TFLOP/s | 11 % |" in rows


@pytest.mark.parametrize("part", [*PARTS])
def test_a_part_that_failed_has_no_row_and_the_others_have_theirs(part: str) -> None:
    broken = SECTION["gpu"](GPU | {part: {"failed": "CUDA error", "rows": []}})
    assert 0 < len(broken) < len(SECTION["gpu"](GPU))


def test_what_is_not_there_is_a_missed_goal() -> None:
    assert lacking(GPU) == "continuous skipped; profile failed; several GPUs are not measured; nor is vLLM beside"
    whole = {name: {} for name in PARTS} | {"ranks": {"1": {}, "2": {}}, "vllm": {"vllm": {"rows": []}}}
    assert lacking(whole) == ""


def test_the_page_has_a_heading_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps({"machine": MACHINE, "results": GPU}))
    for one in report.RESULTS.glob("*.json"):
        if one.name != "gpu.json":
            (tmp_path / one.name).symlink_to(one)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    page = summary.page()
    assert page.count("## H100 80GB, 16 cores\n\n### On a GPU (`make gpu`)\n\n| what | stretto |") == 1
    assert "| every number on a GPU | continuous skipped; " in page
    assert "nothing has been measured" not in page
