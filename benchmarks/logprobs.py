"""How far an engine's log-probabilities are from the trainer's: the distribution of |Δ log p| for each make, type and
model family.

    python -m benchmarks.logprobs                                        all: about 20 minutes on two free cores
    python -m benchmarks.logprobs --makes native transformers            without servers; nothing is written
    python -m benchmarks.logprobs --models qwen3 pretrained --makes vllm
    python -m benchmarks.logprobs --models llama --makes native --merge  into the result, whose other rows stay

Servers of both types start at once: a family costs a minute or two for each of their makes.

The trainer is transformers in float32, with weights in float32. An engine has weights and arithmetic in its own dtype;
the difference of "transformers" in bfloat16 is no fault of an engine. Two ways: *scored*, a fixed set of token
sequences drawn from a seed, in one forward pass; *sampled*, tokens that the engine samples after fixed prompts, with
its KV cache.

Differences in nats depend on the model's depth and confidence, so they are also given in units of rounding
(`stretto.core.canary.Canary.unit`). New models are small and random; the pretrained one is SmolLM2-135M-Instruct, 30
layers deep, whose sequences are sentences.

An engine is judged by the mean over 32 or more of its tokens (`stretto.loop.engines.proving`). So the largest mean over
32 consecutive tokens of a text is what a correct engine may show.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.environment import Environment, PeerUnavailable
from benchmarks.report import RESULTS, Table, save
from recipes.smollm2 import NAME, fetch
from stretto.core.canary import Canary
from stretto.core.errors import StrettoError
from stretto.core.machine import cache_folder
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto_servers.http import JsonServer
from stretto_servers.make import Continuation, Make, launch_of, make_of
from stretto_servers.server import ServerProcess, port_of, reserve_port, until_ready
from tests.tiny_policy import make_of_family

RESULT = "logprob-distribution"
SHARES = (0.5, 0.9, 0.99, 0.999, 1.0)
DTYPES = ("float32", "bfloat16")
_FRACTIONS = {"float32": 1e6, "bfloat16": 1e3}  # in which the table says nats
SERVERS = ("vllm", "sglang")
MAKES = ("transformers", "native", *SERVERS)
PRETRAINED = "pretrained"
JUDGED = 32  # tokens
#: vLLM's attention on a processor takes heads of 32 numbers at least; with many letters, completions are long.
SMALL = BuildConfig(
    hidden_size=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate_size=48,
    context_length=1024,
    alphabet="0123456789+-=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ",
    initializer_range=0.15,
)
_WIDER = {"hidden_size": 128, "heads": 4, "kv_heads": 2, "intermediate_size": 256, "initializer_range": 0.08}
_WINDOW = 24
#: Families that are made anew in the shape of a small llama: their name in transformers, and what is their own.
_MADE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gemma 3": (
        "gemma3_text",
        {
            "sliding_window": _WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
            "tie_word_embeddings": False,  # tied random weights repeat the newest token
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 2.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.75,
            "logits_scaling": 1.25,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3 with experts": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
#: Models that are mixtures of experts, where rounding may send a token to another expert.
WITH_EXPERTS = frozenset({"qwen3 with experts", "mixtral"})
#: What a server computes otherwise than transformers, by make and model; these are not measured.
UNSERVED: Mapping[tuple[str, str], str] = {
    ("sglang", "gemma 3"): "it does not load an output layer that is not tied to the embedding",
    ("sglang", "mistral, window of 24"): "it computes Mistral as Llama, without the window",
}
_SEED, _COUNT, _LENGTH = 11, 48, 96
_PROMPT = 8
_START_SECONDS, _REPLY_SECONDS = 900.0, 300.0
_TEXT = (
    "The lighthouse keeper counted the ships that passed before noon, and wrote their names into a long thin book.",
    "Add the two numbers, then multiply the result by three; if it is larger than fifty, subtract seven from it.",
    "Rain fell on the old town for nine days, so the market moved into the cathedral and sold bread under the bells.",
    "A function that calls itself needs a case in which it does not, or it will call itself until memory runs out.",
    "My grandmother kept bees behind the house; she said that they knew the weather better than the radio ever did.",
    "Water boils at a lower temperature on a mountain, because the air above it weighs less than at the sea.",
    "The committee met twice, agreed on nothing, and published a report of four hundred pages about the agreement.",
    "To sort a list, split it in halves, sort each of them in the same way, and merge the two into one sorted list.",
)

Texts = Sequence[tuple[int, ...]]
Way = Literal["scored", "sampled"]
#: The trainer's log-probability of each token of each text, and the engine's.
Pairs = list[list[tuple[float, float]]]


def models() -> Mapping[str, BuildConfig | None]:
    """Models by name: the shape of a new model, None for the pretrained one."""
    return {
        "qwen3": SMALL,
        "qwen3, 12 layers": SMALL.model_copy(update=_WIDER | {"layers": 12}),
        "qwen2": SMALL.model_copy(update=_WIDER | {"family": "qwen2", "layers": 4}),
        "llama": SMALL.model_copy(update=_WIDER | {"family": "llama", "layers": 4}),
        "mistral, window of 24": SMALL.model_copy(update=_WIDER | {"family": "llama", "layers": 4}),
        **{name: SMALL.model_copy(update=_WIDER | {"family": "llama", "layers": 4}) for name in _MADE},
        PRETRAINED: None,
    }


def build(name: str, folder: Path) -> None:
    """Write the folder of a model."""
    if (shape := models()[name]) is None:
        target = cache_folder() / "models" / NAME
        if not target.exists():
            fetch(target)
        folder.symlink_to(target)
        return
    build_policy(shape, folder, seed=_SEED)
    if name.startswith("mistral"):
        _make_mistral(folder)
    if name in _MADE:
        make_of_family(folder, *_MADE[name], shape, _SEED)


def _make_mistral(folder: Path) -> None:
    """Convert a folder of llama, whose parameters have the same names, to mistral with an attention window."""
    before = AutoConfig.from_pretrained(folder).to_dict()
    for key in ("model_type", "architectures", "rope_scaling", "attention_bias", "mlp_bias", "pretraining_tp"):
        before.pop(key, None)
    config = AutoConfig.for_model("mistral", **before | {"sliding_window": _WINDOW})
    config.architectures = ["MistralForCausalLM"]
    config.save_pretrained(folder)


def texts_of(name: str, folder: Path, count: int = _COUNT, length: int = _LENGTH) -> Texts:
    """The fixed set of texts."""
    if name == PRETRAINED:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        return [tuple(tokenizer(text).input_ids) for text in _TEXT]
    shape = models()[name]
    assert shape is not None
    drawn = np.random.default_rng(_SEED)
    return [tuple(line) for line in drawn.integers(2, len(shape.vocabulary), (count, length)).tolist()]


def reference(folder: Path, texts: Texts, dtype: str = "float32") -> list[list[float]]:
    """Log-probabilities by transformers, of all tokens but the first of each text."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = model.to(getattr(torch, dtype))
    found = []
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([text])
            lines: Tensor = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(lines.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def by_native(folder: Path, dtype: str, texts: Texts) -> list[list[float]]:
    """Log-probabilities by the native engine."""
    engine = _native(folder, dtype)
    return [list(engine.prove(Canary(0, text, (), 1)).logprobs) for text in texts]


async def by_server(make: Make, texts: Texts) -> list[list[float]]:
    """Log-probabilities by a server."""
    return [list(await make.score(text)) for text in texts]


def _native(folder: Path, dtype: str) -> NativeEngine:
    return NativeEngine.load(folder, EngineConfig.model_validate({"slots": 16, "dtype": dtype, "cache_gib": 0.25}))


def sampled_by_native(folder: Path, dtype: str, prompts: Texts, length: int) -> tuple[Texts, list[list[float]]]:
    engine = _native(folder, dtype)
    for number, prompt in enumerate(prompts):
        engine.add(GenerateRequest(str(number), prompt, (number,), Sampling(max_tokens=length)))
    ended = []
    while not engine.idle:
        ended += engine.step()
    whole = [(*prompts[int(one.request)], *one.token_ids) for one in ended]
    return whole, [list(one.behavior_logprobs) for one in ended]


async def sampled_by_server(make: Make, prompts: Texts, length: int) -> tuple[Texts, list[list[float]]]:
    async def completion(number: int, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
        wanted = Continuation(f"sampled-{number}", prompt, Sampling(max_tokens=length), length, seed=number)
        tokens, logprobs = list[int](), list[float]()
        async with aclosing(make.stream(wanted)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                logprobs += delta.logprobs
        return tokens, logprobs

    found = await asyncio.gather(*(completion(number, prompt) for number, prompt in enumerate(prompts)))
    whole = [(*prompt, *tokens) for prompt, (tokens, _) in zip(prompts, found, strict=True)]
    return whole, [logprobs for _, logprobs in found]


@dataclass(frozen=True)
class Distribution:
    """Distribution of |Δ log p| in nats: `quantiles` at `SHARES`, and `judged`, the largest mean over `JUDGED`
    consecutive tokens. `unit`: one unit of rounding in nats; `units`: the mean in these units."""

    model: str
    make: str
    dtype: str
    way: Way
    tokens: int
    mean: float
    quantiles: tuple[float, ...]
    judged: float
    unit: float
    units: float

    @property
    def largest(self) -> float:
        """The largest difference, in units of rounding."""
        return self.quantiles[-1] / self.unit


def distribution(model: str, make: str, dtype: str, way: Way, depth: int, pairs: Pairs) -> Distribution:
    """Distribution for a model with `depth` layers."""
    gaps = [np.abs(np.subtract(*np.transpose(text))) for text in pairs]
    every = np.concatenate(gaps)
    unit = Canary(0, (), tuple(expected for text in pairs for expected, _ in text), depth).unit(dtype)
    mean = fmean(every.tolist())
    quantiles = tuple(float(np.quantile(every, share)) for share in SHARES)
    judged = max(
        float(np.convolve(text, np.full(few := min(JUDGED, len(text)), 1 / few), "valid").max()) for text in gaps
    )
    return Distribution(model, make, dtype, way, len(every), mean, quantiles, judged, unit, mean / unit)


def pairs_of(expected: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> Pairs:
    """Pairs of log-probabilities, token by token. If a text is longer on one side, its last tokens count."""
    return [list(zip(one[-len(other) :], other, strict=True)) for one, other in zip(expected, found, strict=True)]


def on_record() -> list[Distribution]:
    """Distributions in the committed result."""
    rows = json.loads((RESULTS / f"{RESULT}.json").read_text())["results"]["rows"]
    return [Distribution(**row | {"quantiles": tuple(row["quantiles"])}) for row in rows]


def merged(before: Sequence[Distribution], found: Sequence[Distribution]) -> list[Distribution]:
    """Rows of both, by model and make; the newer of two rows of the same cell."""
    cells = {(one.model, one.make, one.dtype, one.way): one for one in (*before, *found)}
    order = (list(models()), MAKES, DTYPES, ("scored", "sampled"))
    return sorted(
        cells.values(),
        key=lambda one: [
            kinds.index(kind) for kinds, kind in zip(order, (one.model, one.make, one.dtype, one.way), strict=True)
        ],
    )


def beyond(found: Distribution, record: Sequence[Distribution]) -> list[str]:
    """Sentences about distributions that are too far from the trainer: more than twice the farthest on record of this
    make and dtype, in units of rounding. Mixtures of experts are compared with each other, and so are the other
    models."""
    routed = found.model in WITH_EXPERTS
    alike = [one for one in record if (one.model in WITH_EXPERTS) == routed]
    own = [one for one in alike if (one.make, one.dtype) == (found.make, found.dtype)]
    mean, largest = 2 * max(one.units for one in own), 2 * max(one.largest for one in own)
    told = f"{found.model}, {found.make} {found.dtype}, {found.way}"
    return [
        f"{told}: {name} is {units:.2g} units of rounding, {most:.2g} allowed"
        for name, units, most in (("the mean", found.units, mean), ("a token", found.largest, largest))
        if units > most
    ]


def markdown(rows: Sequence[Distribution]) -> str:
    """Table of the mean and of `judged`, in the fractions of a nat of `_FRACTIONS`; for each, the larger of scored and
    sampled."""
    lines = [f"| model | type | {' | '.join(MAKES)} |", f"|---|---|{'---|' * len(MAKES)}"]
    for model in dict.fromkeys(one.model for one in rows):
        for dtype in DTYPES:
            cells = []
            for make in MAKES:
                own = [one for one in rows if (one.model, one.make, one.dtype) == (model, make, dtype)]
                pairs = zip(*((one.mean, one.judged) for one in own), strict=True)
                farthest = [f"{max(map(float, few)) * _FRACTIONS[dtype]:.3g}" for few in pairs]
                cells.append(" · ".join(farthest) if own else "–")
            lines.append(f"| {model} | {dtype} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written(rows: Sequence[Distribution]) -> None:
    """Write the result, and print its table."""
    save(RESULT, {"shares": SHARES, "rows": [asdict(row) for row in rows]})
    print(markdown(rows))


class Measuring:
    """Measurements of one model: its set of texts (or the first of them), and the trainer's log-probabilities."""

    def __init__(self, name: str, folder: Path, count: int = _COUNT) -> None:
        self.name, self.folder = name, folder
        self.texts = texts_of(name, folder)[:count]
        self.expected = reference(folder, self.texts)
        self.prompts = [text[:_PROMPT] for text in self.texts]
        self.depth: int = AutoConfig.from_pretrained(folder).num_hidden_layers

    def of_transformers(self, dtype: str) -> Distribution:
        """Distribution of transformers in a dtype other than float32; in float32, transformers is the reference
        itself."""
        return self._scored("transformers", dtype, reference(self.folder, self.texts, dtype))

    def of_native(self, dtype: str) -> list[Distribution]:
        """Distributions of the native engine, for texts that it scores and tokens that it samples."""
        sampled = sampled_by_native(self.folder, dtype, self.prompts, _LENGTH)
        return [
            self._scored("native", dtype, by_native(self.folder, dtype, self.texts)),
            self._sampled("native", dtype, *sampled),
        ]

    async def of_server(self, kind: str, dtype: str, make: Make) -> list[Distribution]:
        """Same as `of_native`, for a running server that has the model."""
        sampled = await sampled_by_server(make, self.prompts, _LENGTH)
        return [
            self._scored(kind, dtype, await by_server(make, self.texts)),
            self._sampled(kind, dtype, *sampled),
        ]

    def measured(self, make: str) -> list[Distribution]:
        """Distributions of a make in each dtype."""
        if make == "transformers":
            return [self.of_transformers(dtype) for dtype in DTYPES[1:]]
        if make in SERVERS:
            return asyncio.run(self._served(make))
        return [one for dtype in DTYPES for one in self.of_native(dtype)]

    def _scored(self, make: str, dtype: str, found: Sequence[Sequence[float]]) -> Distribution:
        return distribution(self.name, make, dtype, "scored", self.depth, pairs_of(self.expected, found))

    def _sampled(self, make: str, dtype: str, whole: Texts, found: Sequence[Sequence[float]]) -> Distribution:
        expected = reference(self.folder, whole)
        return distribution(self.name, make, dtype, "sampled", self.depth, pairs_of(expected, found))

    async def _served(self, kind: str) -> list[Distribution]:
        """Distributions of one server for each dtype. The servers start at the same time. A server that does not start
        is told, and left out."""
        found = []
        async with AsyncExitStack() as stack:
            started = {dtype: await self._start(kind, dtype, stack) for dtype in DTYPES}
            for dtype, (process, make) in started.items():
                try:
                    await until_ready(process, make, _START_SECONDS)
                    found += await self.of_server(kind, dtype, make)
                except StrettoError as problem:
                    print(f"{self.name}, {kind} {dtype}, is not measured: {problem}")
        return found

    async def _start(self, kind: str, dtype: str, stack: AsyncExitStack) -> tuple[ServerProcess, Make]:
        settings = {"kind": kind, "python": str(Environment(kind).ensure()), "cache_gib": 0.5, "slots": 16}
        config = EngineConfig.model_validate(settings | {"dtype": dtype, "device": "cpu"})
        port = port_of(stack.enter_context(reserve_port()))
        process = await ServerProcess.start(kind, launch_of(config, str(self.folder.resolve()), port))
        stack.push_async_callback(process.stop)
        http = JsonServer(kind, f"127.0.0.1:{port}", seconds=_REPLY_SECONDS, token_seconds=_REPLY_SECONDS)
        make = make_of(kind, http, _REPLY_SECONDS)
        stack.push_async_callback(make.close)
        return process, make


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="The distribution of the engines' |Δ log p|.")
    parser.add_argument("--makes", nargs="+", default=MAKES, choices=MAKES)
    parser.add_argument("--models", nargs="+", default=tuple(models()), choices=tuple(models()))
    parser.add_argument("--merge", action="store_true", help="write the rows, beside those on record of other cells")
    words = parser.parse_args(arguments)
    shares = tuple(f"{100 * share:g} %" for share in SHARES)
    table = Table("model", "make", "type", "way", "tokens", "mean", *shares, f"of {JUDGED}", "units")
    rows = list[Distribution]()
    with tempfile.TemporaryDirectory(prefix="stretto-logprobs-") as scratch:
        for number, name in enumerate(words.models):
            folder = Path(scratch) / str(number)
            build(name, folder)
            measuring = Measuring(name, folder)
            for make in words.makes:
                if why := UNSERVED.get((make, name)):
                    print(f"{make} does not serve {name}: {why}")
                    continue
                try:
                    found = measuring.measured(make)
                except PeerUnavailable as problem:
                    print(f"{make} cannot be installed: {problem}")
                    continue
                for row in found:
                    rows.append(row)
                    numbers = (row.mean, *row.quantiles, row.judged, row.units)
                    table.add(name, make, row.dtype, row.way, row.tokens, *(f"{number:.2g}" for number in numbers))
                    table.show_last()
                if words.merge:  # at once, so that what is measured stays if a later server fails
                    written(merged(on_record(), rows))
    if (tuple(words.makes), tuple(words.models)) == (MAKES, tuple(models())):
        written(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
