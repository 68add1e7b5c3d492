"""How fast llama.cpp generates on this machine, in its own environment; imports nothing of stretto.

    PEER=$(python benchmarks/peers/environment.py llamacpp)
    "$PEER" benchmarks/peers/llamacpp_generate.py MODEL_DIR --dtype float32 --sequences 1 16 64 --tokens 192

Uses the loop of llama.cpp's own example for parallel sequences: each batch has one token of each sequence, and each
sequence has a sampler. MODEL_DIR, a Qwen3 model, is first converted to GGUF, which the seconds do not include. float32:
weights and KV cache. bfloat16: weights in BF16, KV cache in F16, llama.cpp's default, or BF16. The library is compiled
for this processor when the environment is built.

In the peer's favour: no log-probabilities, no text, and for each number of sequences the fastest type of cache, with or
without flash attention, found by shorter answers beforehand. Prints one JSON object as the last line of standard
output:
``{"rows": [{"sequences": 64, "tokens": 12288, "seconds": 2.4}, ...], "version": "0.3.36"}``
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as llama
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

PROMPT_TOKENS = 32
WEIGHTS = {"float32": Kind.F32, "bfloat16": Kind.BF16}
FLASH = (llama.LLAMA_FLASH_ATTN_TYPE_DISABLED, llama.LLAMA_FLASH_ATTN_TYPE_ENABLED)
#: Type of the KV cache and flash attention, by dtype: the ways to choose from.
WAYS = {
    "float32": [(Kind.F32, flash) for flash in FLASH],
    "bfloat16": [(cache, flash) for cache in (Kind.F16, Kind.BF16) for flash in FLASH],
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp as the peer of the embedded engine")
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=tuple(WEIGHTS), default="float32")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3, help="the fastest one counts")
    words = parser.parse_args()
    silent = llama.llama_log_callback(lambda level, text, user: None)
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    with tempfile.TemporaryDirectory(prefix="llamacpp-model-") as folder:
        path = Path(folder) / "model.gguf"
        write(words.model, path, WEIGHTS[words.dtype])
        model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
    rows = [measure(model, words, count) for count in words.sequences]
    print(json.dumps({"rows": rows, "version": version("llama-cpp-python")}))


def write(folder: Path, path: Path, kind: Kind) -> None:
    """Convert the folder of a Qwen3 model to GGUF, without a tokenizer. Norms stay float32, as in llama.cpp's own
    converter."""
    config, writer = json.loads((folder / "config.json").read_text()), gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, value in load_file(folder / "model.safetensors").items():
        flat = value.ndim == 1
        numbers = value.astype(np.float32) if flat else gguf.quants.quantize(value.astype(np.float32), kind)
        writer.add_tensor(name_of(name), numbers, raw_dtype=None if flat else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_of(name: str) -> str:
    """Name that GGUF uses for a tensor of Qwen3."""
    parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
    if parts[0] == "layers":
        return f"blk.{parts[1]}.{NAMES[parts[2]]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]] + ".weight"


def measure(model: Any, words: argparse.Namespace, count: int) -> dict[str, Any]:
    """Generate for `count` prompts in the fastest way, once for each pass, and return the seconds of each pass."""
    asked, few = prompts(count, words.vocabulary), max(4, words.tokens // 4)
    trials = {way: min(timed(model, way, asked, few, words.threads, 2)) for way in WAYS[words.dtype]}
    cache, flash = best = min(trials, key=trials.__getitem__)
    seconds = timed(model, best, asked, words.tokens, words.threads, words.passes)
    row = {"sequences": count, "tokens": count * words.tokens, "seconds": min(seconds), "passes": seconds}
    return row | {"cache": cache.name, "flash attention": bool(flash)}


def timed(
    model: Any, way: tuple[Kind, int], asked: list[list[int]], tokens: int, threads: int, passes: int
) -> list[float]:
    """Seconds of each pass over the prompts, in one of the `WAYS`, after a short first one."""
    settings, count = llama.llama_context_default_params(), len(asked)
    length = -(-(PROMPT_TOKENS + tokens) // 256) * 256  # llama.cpp rounds it up itself
    settings.n_ctx, settings.n_seq_max = length * count, count
    settings.n_batch = settings.n_ubatch = max(512, count)
    settings.n_threads = settings.n_threads_batch = threads
    settings.type_k = settings.type_v = way[0]
    settings.flash_attn_type = way[1]
    settings.kv_unified = False
    context, seconds = llama.llama_init_from_model(model, settings), []
    generate(context, asked, 4, settings.n_batch)
    for _ in range(passes):
        start = time.perf_counter()
        done = generate(context, asked, tokens, settings.n_batch)
        seconds.append(round(time.perf_counter() - start, 6))
        if done != count * tokens:
            raise ValueError(f"{done} tokens instead of {count} times {tokens}")
    llama.llama_free(context)
    return seconds


def generate(context: Any, asked: list[list[int]], tokens: int, most: int) -> int:
    """Sample from the softmax of the logits at temperature 1; no answer ends early."""
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    samplers = [llama.llama_sampler_init_dist(seed) for seed in range(len(asked))]
    batch = llama.llama_batch_init(most, 0, 1)
    newest = []
    together = most // PROMPT_TOKENS
    for first in range(0, len(asked), together):
        some = asked[first : first + together]
        fill(batch, [(ids, first + row, 0) for row, ids in enumerate(some)])
        decode(context, batch)
        ends = range(PROMPT_TOKENS - 1, batch.n_tokens, PROMPT_TOKENS)
        newest += [llama.llama_sampler_sample(samplers[first + row], context, end) for row, end in enumerate(ends)]
    done = len(newest)
    fill(batch, [([token], row, PROMPT_TOKENS) for row, token in enumerate(newest)])
    ids, places = (np.ctypeslib.as_array(numbers, (done,)) for numbers in (batch.token, batch.pos))
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + tokens - 1):
        ids[:], places[:] = newest, position
        decode(context, batch)
        newest = [llama.llama_sampler_sample(sampler, context, row) for row, sampler in enumerate(samplers)]
        done += len(newest)
    llama.llama_batch_free(batch)
    for sampler in samplers:
        llama.llama_sampler_free(sampler)
    return done


def fill(batch: Any, parts: list[tuple[list[int], int, int]]) -> None:
    """Fill the batch with tokens of sequences, each from a position on. Logits are requested for the last token of
    each."""
    place = 0
    for ids, row, position in parts:
        for number, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, position + number
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, row
            batch.logits[place] = number == len(ids) - 1
            place += 1
    batch.n_tokens = place


def decode(context: Any, batch: Any) -> None:
    if failed := llama.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode gives {failed}")


def prompts(count: int, vocabulary: int) -> list[list[int]]:
    """The same prompts that `benchmarks.generators` uses."""
    chance = random.Random(7)
    return [[chance.randrange(2, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


if __name__ == "__main__":
    main()
