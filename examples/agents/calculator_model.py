"""Make the start of `recipes/calculator_agent.toml`: a small chat model that has sometimes seen a tool used.

    python examples/agents/calculator_model.py build/calculator

It writes ``policy`` (a model folder: a tokenizer with the tokens of ChatML and of tool calls, a chat template, weights)
and ``questions.jsonl``. The demonstrations multiply two numbers: most state the product at once, which a small model
cannot learn; some call the calculator and copy its result, which it can learn.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stretto_app.extensions.commands.supervised import sft

TEMPLATE = """\
{%- if tools and messages[0].role != 'system' %}{{ '<|im_start|>system\\nTools:' }}\
{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- if loop.first and tools %}{{ '\\nTools:' }}\
{%- for tool in tools %}{{ ' ' + tool.function.name }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
INSTRUCTIONS = "Answer with the number alone."
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]
USED = 0.25  # share of the demonstrations that call the calculator
CONTEXT = 160

RECIPE = """\
seed = 1
[model]
path = "base"
[task]
kind = "jsonl"
file = "demonstrations.jsonl"
held_out = 1
[warm_start]
steps = 1500
batch_size = 64
learning_rate = 3e-3
warmup_steps = 30
schedule = "cosine"
weight_decay = 0.01
threads = 2
[sampling]
max_tokens = 32
[rewards]
function = "final_answer"
[trainer]
steps = 1
"""


def question(chance: random.Random) -> tuple[int, int]:
    """Draw two random numbers of three digits."""
    return chance.randrange(100, 1000), chance.randrange(100, 1000)


def conversations(count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield complete conversations of the assistant, a quarter of them with calls of its calculator."""
    chance = random.Random(seed)
    for number in range(count):
        one, other = question(chance)
        expression = f"{one}*{other}"
        call = {"function": {"name": "calculator", "arguments": {"expression": expression}}}
        told: list[dict[str, Any]] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": f"What is {expression}?"},
        ]
        if number < USED * count:
            told += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": str(one * other)},
            ]
        yield [*told, {"role": "assistant", "content": str(one * other)}]


@cache
def template() -> jinja2.Template:
    """Compile the chat template in the same way as transformers."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(TEMPLATE)


def rendered(conversation: list[dict[str, Any]], *, opening: bool = False) -> str:
    """Text of a conversation by the chat template. `opening`: add the beginning of the next assistant turn."""
    return template().render(messages=conversation, tools=TOOLS, add_generation_prompt=opening)


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on these texts. Each digit is a token of its own."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=50
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    found = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=SPECIAL[0], eos_token=SPECIAL[2])
    found.chat_template = TEMPLATE
    return found


def build(words: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model with random weights, and the tokenizer `words`, to `folder`."""
    architecture = AutoConfig.for_model(
        "qwen3", vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, intermediate_size=128, max_position_embeddings=CONTEXT,
        tie_word_embeddings=True, rope_theta=1000.0, initializer_range=0.05, bos_token_id=None,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(architecture, dtype=torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)


def main(folder: Path) -> None:
    """Write all files to `folder`, and train the policy on the demonstrations."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = list(conversations(12_000, seed=1))
    build(tokenizer([rendered(one) for one in shown[:: len(shown) // 1_000]]), folder / "base")
    with (folder / "demonstrations.jsonl").open("w", encoding="utf-8") as rows:
        for one in shown:
            for place in (at for at, message in enumerate(one) if message["role"] == "assistant"):
                prompt = rendered(one[:place], opening=True)
                said = rendered(one[: place + 1]).removeprefix(prompt).removesuffix("<|im_end|>\n")
                row = {"prompt": prompt, "answer": one[-1]["content"], "demonstration": said}
                rows.write(json.dumps(row) + "\n")
    chance = random.Random(2)
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as rows:
        for first, second in {question(chance): None for _ in range(4_000)}:
            row = {"prompt": f"What is {first}*{second}?", "answer": str(first * second)}
            rows.write(json.dumps(row) + "\n")
    recipe = folder / "warm_start.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    sft(recipe, [], folder / "policy", lambda progress: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
