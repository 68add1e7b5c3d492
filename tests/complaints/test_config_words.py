"""What users suffered: nobody knows which batch a key means: prompts or completions, before or behind the accumulation
(EasyR1#6, Logic-RL#56, OpenRLHF#1185); and a command of the documentation does not exist (verl#2804).

Promises: `--dry-run` says what a step and the run come to, in prompts, completions, sequences, optimizer steps and
tokens; every command and every option that a page names is one of stretto, and every command in a block can be parsed.
"""

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from stretto_app.cli.main import app
from tests.launch.running import TINY, Laboratory

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md"),
]
_BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\s*(?:\$ )?(?:\.venv/bin/)?stretto ([a-z]+(?: [^\n]*)?)$", re.MULTILINE)
_INLINE = re.compile(r"`stretto ([a-z][^`]*)`")


@pytest.mark.parametrize(
    ("overrides", "step", "run"),
    [
        (
            [],  # 10 tokens of the longest prompt and 64 of a completion: 74 for each of 8
            "2 prompts × 4 completions = 8 sequences, trained in 2 optimizer steps of about 4; 592 tokens at most",
            "6 steps: 12 prompts (0.19 epochs), 48 sequences, 12 optimizer steps, 3,552 tokens at most",
        ),
        (
            ["rollout.batch_size=1", "rollout.group_size=3", "trainer.minibatches=3", "trainer.steps=640"],
            "1 prompt × 3 completions = 3 sequences, trained in 3 optimizer steps of about 1; 222 tokens at most",
            "640 steps: 640 prompts (10 epochs), 1,920 sequences, 1,920 optimizer steps, 142,080 tokens at most",
        ),
    ],
)
def test_a_dry_run_says_what_all_comes_to(laboratory: Laboratory, overrides: list[str], step: str, run: str) -> None:
    out = laboratory.run("train", TINY, *overrides, "--dry-run").well()
    assert f"\na step      {step}\nthe run     {run}\n" in out


@cache
def commands() -> dict[str, Any]:
    """Those of the command line, by name."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def words_of(command: str) -> list[str]:
    """A command without its comment and without what stands for something else."""
    return shlex.split(re.split(r"\s#|\s[|>&;]|\s\\$", command)[0].replace("...", " "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_that_a_page_names_exists(page: Path) -> None:
    text, known = page.read_text(encoding="utf-8"), commands()
    wrong = []
    for found in _INLINE.findall(_BLOCK.sub("", text).replace("\n", " ")):
        name, *others = re.sub(r"[\[\]|,]", " ", found).split()
        options = {option for parameter in known[name].params for option in parameter.opts} if name in known else {}
        if name not in known or (unknown := {word for word in others if word.startswith("-")} - set(options)):
            wrong.append((found, name not in known or unknown))
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_in_a_block_can_be_parsed(page: Path) -> None:
    for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        for found in _COMMAND.findall(block.replace("\\\n", " ")):
            name, *others = words_of(found)
            commands()[name].make_context(name, others)
