"""Promises: the page shows what was measured on a GPU, part by part, under the name of the GPU; what failed, was
skipped or is not there is a missed goal; a part without results is no row."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, summary
from benchmarks.gpu_rows import PARTS, SECTION, lacking

GPU: dict[str, Any] = {
    "decode": {
        "copy_gb_per_second": 3000.0,
        "exactness": [{"tokens": 256, "off_from_float32": 0.01, "transformers_off_from_float32": 0.02}],
        "rows": [
            {
                "sequences": 32,
                "context": 1024,
                "engine_tokens_per_second": 5000.0,
                "engine_ms": 6.4,
                "floor_ms": 1.6,
                "engine_of_floor": 0.25,
            },
            {"sequences": 256, "context": 8192, "skipped": "needs about 300 of 80 GiB"},
        ],
    },
    "beside": {
        "prompt_tokens": 512,
        "answer_tokens": 64,
        "rows": [
            {"sequences": 1, "stretto_tokens_per_second": 200.0, "generate_tokens_per_second": 40.0},
            {"sequences": 32, "stretto_tokens_per_second": 5000.0, "generate_tokens_per_second": 1000.0},
        ],
        "training": {
            "tokens": 8192,
            "sequences": 16,
            "stretto_tokens_per_second": 30000.0,
            "stretto_peak_gib": 20.0,
            "padded_tokens_per_second": 20000.0,
            "padded_peak_gib": 40.0,
        },
    },
    "compiled": {"rows": [{"sequences": 32, "generate_compiled_tokens_per_second": 2500.0}]},
    "continuous": {"skipped": "takes about 25 s, and 3 s were left"},
    "training": {
        "peak_tflops": 989.0,
        "rows": [{"tokens": 8192, "sequences": 16, "tokens_per_second": 30000.0, "mfu": 0.11, "peak_gib": 20.0}],
    },
    "run": {
        "generated_per_second": 9000.0,
        "trained_per_second_of_training": 25000.0,
        "staleness_mean": 1.25,
        "mfu_of_training": 0.1,
        "weights": {"bytes": 1_200_000_000, "seconds_pause_median": 0.05, "seconds_pull_median": 0.4},
    },
    "learn": {"accuracy": [[0, 0.0, 0.42], [100, 20.0, 0.8], [200, 40.0, 0.91]]},
    "kernels": {
        "reading": [{"rows": 32, "context": 1024, "fused_ms": 0.1, "plain_ms": 0.5}],
        "packed": {"tokens": 8192, "flash_ms": 2.0, "bucketed_ms": 3.0},
    },
    "drawing": {
        "vocabulary": 151_936,
        "plain": [{"rows": 32, "fused_ms": 0.2, "plain_ms": 0.6}],
        "filtered": [{"rows": 32, "fused_ms": 0.5, "plain_ms": 1.0}],
    },
    "memory": {"tokens": 16_384, "estimated_gib": 50.0, "peak_gib": 49.0, "peak_of_estimate": 0.98},
    "publication": {"step_alone": [0.3], "step_beside": [0.31, 0.33], "copy": [0.01], "write": [0.4]},
    "profile": {"failed": "ended with exit code 1"},
    "tests": {"told": "40 passed in 20.00s"},
    "ranks": {"ranks": "one GPU"},
}
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
    told = lacking(GPU)
    assert told == "continuous skipped; profile failed; several GPUs are not measured; nor is vLLM beside"
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
