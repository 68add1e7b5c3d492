"""What a command imports before it knows that it has something to do: no more than the mistake or the answer needs.

Modules are counted, and not seconds, which depend on the machine; `python -m benchmarks.commands` measures those.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stretto.store.run_folder import RunFolder
from tests.launch.running import TINY

ROOT = Path(__file__).parents[2]
#: Seconds each; a check of paths and words needs none of them.
HEAVY = ("torch", "transformers", "numba", "matplotlib", "safetensors", "sympy", "tokenizers", "peft", "datasets")
#: Tenths of a second: a recipe needs pydantic and numpy, a summary rich and numpy, and neither the rest.
FURTHER = ("numpy", "rich.console", "aiohttp", "stretto.launch.recipe.recipe")
PATHS = (
    (["train", "nosuch.toml"], "no such file"),
    (["train", "."], "is a folder; a recipe is a TOML file"),
    (["train", "--resume", "."], "holds no run"),
    (["sft", "nosuch.toml", "out"], "no such file"),
    (["dpo", "nosuch.toml", "out"], "no such file"),
    (["plan", "nosuch.toml", "--gpu", "h100"], "no such file"),
    (["study", "nosuch.toml"], "no such file"),
    (["eval", "nosuch", "--task", str(TINY)], "no such folder"),
    (["eval", "nosuch", "--data", "nosuch"], "no such folder"),
    (["serve", "nosuch"], "no such folder"),
    (["gateway", "nosuch"], "no such folder"),
    (["tinker", "nosuch"], "no such folder"),
    (["inspect", "nosuch"], "does not exist"),
    (["check", "nosuch"], "does not exist"),
    (["replay", "nosuch"], "does not exist"),
)
WORDS = (
    (["train", str(TINY), "trainer.step=3"], "did you mean 'steps'"),
    (["train", str(TINY), "algorithm.loss=pppo"], "algorithm.loss"),
    (["train", str(TINY), "--dry-run", "engine.slots=0"], "engine.slots"),
    (["plan", str(TINY), "trainer.step=3", "--gpu", "h100"], "did you mean 'steps'"),
    (["plan", str(TINY), "--gpu", "h900"], "did you mean 'h200'"),
    (["plan", str(TINY), "--gpu", "h100", "--gpus", "0"], "at least 2"),
    (["plan", str(TINY), "--gpu", "h100", "--network", "fast"], "such as 400gbit"),
    (["plan", str(TINY), "--gpu", "h100", "--lengths", "lognormal:mean=-1"], "lognormal has mean and sigma"),
    (["train", "from_hf.toml", "model.path=nosuch"], "no such folder"),
    (["train", str(TINY), "rewards.function=mine:good"], "rewards.function: 'mine' has no 'good'"),
    (["train", str(TINY), "workflow.function=mine:Good"], "workflow.function: 'mine' has no 'Good'"),
    (["train", str(TINY), "workflow.function=nosuch:Good"], "cannot import 'nosuch'"),
    (["train", str(TINY), "workflow.function=multturn"], "did you mean 'multi_turn'"),
)


def imported(folder: Path, *commands: tuple[Sequence[str], str]) -> dict[str, list[str]]:
    """Modules in one interpreter after all of these commands have been refused in it, each with exit code 2 and its
    message; the modules that are there before any are left out."""
    program = (
        "import contextlib, io, json, sys\n"
        "from stretto_app.cli.main import main\n"
        "before, found = set(sys.modules), {}\n"
        f"for words, message in {list(commands)!r}:\n"
        "    sys.argv, told = ['stretto', *words], io.StringIO()\n"
        "    try:\n"
        "        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()): main()\n"
        "    except SystemExit as end: assert end.code == 2, (words, end.code, told.getvalue())\n"
        "    assert message in told.getvalue(), (words, told.getvalue())\n"
        "    found[' '.join(words)] = sorted(set(sys.modules) - before)\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def test_a_path_that_leads_nowhere_is_refused_without_any_library(tmp_path: Path) -> None:
    for command, modules in imported(tmp_path, *PATHS).items():
        assert not {*HEAVY, *FURTHER} & set(modules), command


def test_a_wrong_word_of_a_recipe_is_refused_without_torch(tmp_path: Path) -> None:
    recipe = (ROOT / "recipes" / "from_hf.toml").read_text()
    (tmp_path / "from_hf.toml").write_text(recipe.replace("[algorithm]", "\n[algorithm]"))
    (tmp_path / "mine.py").write_text("import torch\n")
    for command, modules in imported(tmp_path, *WORDS).items():
        assert not {*HEAVY, *FURTHER[:-1]} & set(modules), command


def test_a_summary_of_a_run_is_printed_without_torch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder.create(run).release()
    program = (
        "import sys\nfrom stretto_app.cli.main import main\n"
        "for options in [], ['--ledger'], ['--json']:\n"
        f"    sys.argv = ['stretto', 'inspect', {str(run)!r}, *options]\n"
        "    try: main()\n    except SystemExit as end: pass\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), 'rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1].startswith("[] "), done.stderr
