"""Demonstrations of what the cookbook's environments ask for, half of them right, as the cookbook renders them.

    python demonstrations.py MODEL COUNT > demonstrations.jsonl    {"prompt": token ids, "completion": token ids}

A model that has seen them knows the form, and has something to learn from rewards."""

import asyncio
import json
import random
import sys

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.recipes.math_rl.math_env import MathEnv
from tinker_cookbook.tokenizer_utils import get_tokenizer

LOOP_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."


class Demonstrator:
    """Says what it is given as the model would."""

    def __init__(self, model: str) -> None:
        self.tokenizer = get_tokenizer(model)
        self.renderer = renderers.get_renderer("qwen3", self.tokenizer)
        [self.end] = self.renderer.get_stop_sequences()

    def tell(self, prompt: tinker.ModelInput, said: str) -> None:
        """Print a demonstration."""
        completion = [*self.tokenizer.encode(said, add_special_tokens=False), self.end]
        print(json.dumps({"prompt": prompt.to_ints(), "completion": completion}))

    async def problem(self) -> None:
        """A number in a box, as `rl/train.py` asks for it."""
        prefix = MathEnv.standard_fewshot_prefix()
        env = MathEnv(f"say {random.randrange(10)}.", "7", self.renderer, convo_prefix=prefix)
        prompt, _ = await env.initial_observation()
        self.tell(prompt, f"\\boxed{{{random.choice('67')}}}")

    async def question(self) -> None:
        """A number in a box, as `rl_loop` asks for it."""
        asked, said = MathEnv.standard_fewshot_prefix()
        asked = {**asked, "content": asked["content"].replace(MathEnv.question_suffix(), LOOP_SUFFIX)}
        question = {"role": "user", "content": f"say {random.randrange(10)}.{LOOP_SUFFIX}"}
        prompt = self.renderer.build_generation_prompt([asked, said, question])
        self.tell(prompt, f"\\boxed{{{random.choice('67')}}}")

    async def introduction(self) -> None:
        """A reply of any length, for those who like short ones."""
        prompt = self.renderer.build_generation_prompt([{"role": "user", "content": "Who are you?"}])
        self.tell(prompt, "I am" + " me" * random.randrange(5))


async def main(model: str, count: int) -> None:
    random.seed(0)
    demonstrator = Demonstrator(model)
    for _ in range(count):
        await demonstrator.problem()
        await demonstrator.question()
        await demonstrator.introduction()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
