"""The environment of Tinker's SDK and cookbook; a model with the name of one they know; data of the names that the
cookbook loads, in folders beside it, so that its programs run as they are and without a network."""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import stretto
from benchmarks.peers.environment import Environment, PeerUnavailable
from stretto.engine.config import EngineConfig
from stretto.model.hf.folder import quiet_transformers
from stretto_tinker.compute.base import LocalBackend
from tests.gateway.serving import tokenizer_of
from tests.tinker.speaking import serving
from tests.tiny_policy import sized

#: Run under another interpreter.
collect_ignore = ["programs"]

NAME = "Qwen/Qwen3-8B"  # of the registry of renderers; the model behind it is a small one
PROGRAMS = Path(__file__).parent / "programs"
SECONDS = 600.0
_DEMONSTRATIONS, _STEPS, _BATCH, _RATE = 100, 60, 16, 5e-3
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has the SDK. Where it cannot be installed, its tests are skipped."""
    try:
        return Environment("tinker").ensure()
    except PeerUnavailable as problem:
        pytest.skip(f"Tinker's SDK cannot be installed: {problem}")


def build_model(folder: Path) -> None:
    """A small Qwen3 with random weights that reads ChatML in bytes."""
    tokenizer = tokenizer_of("qwen2_5")
    shape = sized(len(tokenizer.vocabulary), width=64, inner=128, layers=2, heads=(4, 2), head=16)
    own: dict[str, Any] = {"max_position_embeddings": 2048, "eos_token_id": tokenizer.eos_token_ids[0]}
    config = Qwen3Config(**shape, **own, tie_word_embeddings=True, initializer_range=0.05)
    with torch.random.fork_rng(devices=()), quiet_transformers():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer._whole.save_pretrained(folder)


def write_data(folder: Path, splits: dict[str, list[dict[str, Any]]], config: str = "default") -> None:
    """A dataset as `datasets.load_dataset` finds it in a folder."""
    (folder / config).mkdir(parents=True)
    files = []
    for split, rows in splits.items():
        (folder / config / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(f"  - split: {split}\n    path: {config}/{split}.jsonl\n")
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{''.join(files)}---\n")


def write_all_data(folder: Path) -> None:
    """What the recipes load: a coin to toss and a side to bet on, a longer and a shorter reply, numbers to ask for."""
    random.seed(0)
    digits = [random.randrange(10) for _ in range(320)]
    asked = [f"say {a}.{_SUFFIX}" for a in digits]
    said = [
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"\\boxed{{{random.choice('67')}}}"},
            ]
        }
        for question in asked
    ]
    write_data(folder / "HuggingFaceH4" / "no_robots", {"train": said, "test": said[:8]})
    questions = [{"question": f"say {a}.", "answer": "so #### 7"} for a in digits]
    write_data(folder / "openai" / "gsm8k", {"train": questions, "test": questions[:8]}, "main")
    pairs = [
        {"chosen": f"\n\nHuman: say {a}\n\nAssistant: yes {a}", "rejected": f"\n\nHuman: say {a}\n\nAssistant: no"}
        for a in digits
    ]
    write_data(folder / "Anthropic" / "hh-rlhf", {"train": pairs, "test": pairs[:8]})
    problems = [{"question": f"What is {a}?", "final_answer": str(a)} for a in digits]
    write_data(folder / "zwhe99" / "DeepMath-103K", {"train": problems})


@dataclass(frozen=True)
class Bench:
    """A server, and programs that run before it."""

    python: Path
    address: str
    folder: Path

    def run(self, *words: str, key: str = "tml-cook", seconds: float = SECONDS) -> str:
        """What a program of the environment prints."""
        kept = {name: told for name, told in os.environ.items() if "proxy" not in name.lower() and name != "PYTHONPATH"}
        own = {"TINKER_BASE_URL": self.address, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        home = {"HOME": str(self.folder), "HF_HOME": str(self.folder / "hub"), "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [str(self.python), "-W", "ignore", *words],
            env={**kept, **own, **home},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    def recipe(self, recipe: str, log: str, *words: str) -> list[dict[str, Any]]:
        """Run a recipe of the cookbook; its metrics, a row a step."""
        path = self.folder / "logs" / log
        told = (f"model_name={NAME}", f"log_path={path}", *words)
        self.run("-m", f"tinker_cookbook.recipes.{recipe}", *told)
        return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def served(python: Path, folder: Path) -> Iterator[Bench]:
    """The model of a folder, served."""
    backend = LocalBackend(folder / NAME, NAME, EngineConfig(cache_gib=0.5, device="cpu"), 4096)
    with serving(backend, folder / "state") as (address, _):
        yield Bench(python, address, folder)


@pytest.fixture(scope="session")
def bench(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A model with random weights."""
    folder = tmp_path_factory.mktemp("cookbook")
    build_model(folder / NAME)
    write_all_data(folder)
    with served(python, folder) as found:
        yield found


def warm_up(bench: Bench, folder: Path) -> None:
    """Write the model of a bench as it is after demonstrations of what the cookbook's environments ask for."""
    told = bench.run(str(PROGRAMS / "demonstrations.py"), NAME, str(_DEMONSTRATIONS)).splitlines()
    data = [stretto.Datum.of(row["prompt"], row["completion"]) for row in map(json.loads, told)]
    trainer, chosen = stretto.Trainer(bench.folder / NAME), random.Random(0)
    for step in range(_STEPS):
        trainer.forward_backward(chosen.sample(data, _BATCH), "cross_entropy")
        trainer.optim_step(_RATE * min(1.0, 2 * (1 - step / _STEPS)))
    trainer.export(folder)


@pytest.fixture(scope="session")
def warm(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A model that has seen demonstrations, half of them right: rewards can tell its completions apart."""
    folder = tmp_path_factory.mktemp("warm")
    warm_up(bench, folder / NAME)
    write_all_data(folder)
    with served(bench.python, folder) as found:
        yield found
