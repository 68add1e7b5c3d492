"""The door: what each command answers when nothing, or the wrong thing, is asked of it.

- --help is quick, because nothing heavy is imported for it.
- A mistake ends with exit code 2 and one message, without a traceback; nothing is started and nothing is written.
- --dry-run checks everything, starts nothing and writes no run folder.
"""

import io
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto import __version__
from stretto.model.hf.build import build_policy
from stretto.model.hf.config import BuildConfig
from stretto_app.cli.main import _open_streams
from tests.launch.running import TINY, Ended, Laboratory, with_sections

ROOT = Path(__file__).parents[2]
COMMANDS = ["train", "sft", "dpo", "eval", "serve", "score", "inspect", "check", "export", "diff", "replay"]
HEAVY = ["torch", "transformers", "matplotlib", "numpy", "asyncio", "rich.table"]  # pydantic is typer's own
MODULES = 400  # 265 today; with torch there would be thousands

Door = Callable[..., Ended]


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    """Of every command, one after the other in one process: what one of them imported would still be there."""
    program = (
        "import sys\nfrom stretto_app.cli.main import main\n"
        f"for arguments in [[], *([command] for command in {COMMANDS!r})]:\n"
        "    sys.argv = ['stretto', *arguments, '--help']\n"
        "    try: main()\n    except SystemExit as end: assert not end.code\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), len(sys.modules) < {MODULES}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.count("Usage: stretto") == 1 + len(COMMANDS)
    assert done.stderr == "[] True\n"


def test_help_lists_every_command(door: Door) -> None:
    for asked in ("--help", "-h"):
        out = door(asked).well()
        assert not [word for word in (*COMMANDS, "STRETTO_CACHE") if word not in out]
        codes = " ".join(out.split())
        assert "Exit codes: 0 done; 1 failed, a law is broken, or runs differ; 2 a mistake of the user; 128+n" in codes
    assert all(door(command, "-h").code == 0 for command in COMMANDS)


def test_help_has_the_whole_first_sentence_of_each_command(door: Door) -> None:
    for arguments in (["--help"], ["score", "--help"]):
        assert "...\n" not in door(*arguments).out.partition("Commands:")[2]
    assert "verdict and final state." in " ".join(door("--help").out.split())


def test_the_version_is_told(door: Door) -> None:
    told = door("--version")
    assert (told.code, told.out) == (0, f"stretto {__version__}\n")


def test_the_module_can_be_run_as_well() -> None:
    command = [sys.executable, "-m", "stretto_app.cli.main", "inspect", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (2, "stretto: nowhere: does not exist; give a run folder\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train"], "Missing argument 'RECIPE.toml|RUN_DIR'"),
        (["sft"], "Missing argument 'RECIPE.toml'"),
        (["trian"], "No such command 'trian'"),
        (["train", str(TINY), "--run-folder", "x"], "No such option: --run-folder"),
        (
            ["train", str(TINY), "--steps", "5"],
            "--steps; settings are written without dashes, such as trainer.steps=100",
        ),
        (["replay", "run", "trainer.eps=1"], "(trainer.eps=1); each setting has --set before it"),
        (["train", str(TINY), "trainer.steps", "=", "5"], "e.g. trainer.steps=100, without spaces"),
        (["train", "--resume", "nowhere"], "stretto: nowhere: does not exist; give a run folder"),
        (["train", str(TINY), "--resume", str(ROOT)], f"`stretto train --resume {ROOT}` takes the recipe on record in"),
        (["study", str(TINY)], f'this is a recipe; a study has recipe = "{TINY.name}"'),
        (["dpo", str(TINY), "out"], f"{TINY}: preferences: missing; this is a recipe of `stretto train`"),
        (["eval", "model"], "give either --task or --data"),
        (["eval", "model", "--task", "a.toml", "--data", "b"], "give either --task or --data"),
        (["export", "run", "--trace"], "--trace writes a file: give FILE"),
        (["export", "run", "-", "--trace"], "--trace writes a file: give FILE"),
    ],
)
def test_words_that_make_no_sense_are_refused(door: Door, arguments: list[str], expected: str) -> None:
    door(*arguments).refused(expected)


def test_a_broken_recipe_is_refused_with_its_place(door: Door, tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = 1\n[model\n")
    for arguments in (["train", broken], ["train", broken, "--dry-run"], ["sft", broken, tmp_path / "out"]):
        door(*arguments).refused(f"stretto: {broken}: broken TOML", "line 2, column 7")
    door("eval", tmp_path, "--task", broken).refused(f"stretto: {broken}: broken TOML")
    door("train", tmp_path / "nowhere.toml").refused("nowhere.toml: no such file", "did you mean 'broken.toml'?")


def test_all_mistakes_of_a_recipe_come_together(door: Door) -> None:
    told = door("train", TINY, "trainer.step=3", "engine.slots=0", "rollout.beyond_bound=drop")
    told.refused("trainer.step: unknown key; did you mean 'steps'?", "engine.slots: 0", "beyond_bound: 'drop'")
    assert len(told.err.splitlines()) == 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.steps"], "'trainer.steps': not of the form section.key=value"),
        (["sampling.max_tokens=96"], "the model's context has 96 tokens"),
        (["rewards.function=nowhere:reward"], "cannot import 'nowhere'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    door: Door, tmp_path: Path, overrides: list[str], expected: str
) -> None:
    run_dir = tmp_path / "run"
    door("train", TINY, *overrides, "--run-dir", run_dir).refused(expected)
    assert not run_dir.exists()


def test_a_broken_dataset_is_refused_with_its_lines(door: Door, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+1="\n{"prompt": null, "answer": "2"}\n')
    section = f'[task]\nkind = "jsonl"\nfile = "{rows}"\nheld_out = 1\n'
    task = ("[task]", "kind", "operands", "prompts = 64", "held_out", "demonstrations")
    recipe = with_sections(TINY, tmp_path / "recipe.toml", section, without=task)
    told = door("train", recipe, "--run-dir", tmp_path / "run")
    told.refused(f"stretto: {rows}:2: broken JSON", f"{rows}:3: prompt: null; a text is needed")


def test_a_model_folder_that_cannot_be_loaded_is_refused(door: Door, tmp_path: Path) -> None:
    door("eval", tmp_path / "nowhere", "--task", TINY).refused("nowhere: no such folder")
    door("eval", tmp_path, "--task", TINY).refused("config.json: no such file", "holds no weights")


def test_a_run_folder_that_cannot_be_is_refused(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    door("train", TINY, "--run-dir", file / "run").refused("cannot be created: Not a directory")
    door("train", TINY, "--run-dir", tmp_path / "full").refused("is not empty and holds no run (thesis.tex, ...)")
    door("train", "--resume", tmp_path / "full", "--run-dir", tmp_path).refused("--resume: ", "name the run once")
    door("train", TINY, "--resume").refused("--resume: without --run-dir")
    door("train", TINY, "--resume", "--run-dir", tmp_path / "new").refused("new: does not exist")
    door("train", "--resume", tmp_path / "full").refused("full: holds no run")
    door("train", "--resume", tmp_path / "full", "--dry-run").refused("full: holds no run")
    door("inspect", tmp_path / "full").refused("holds no run")
    door("export", tmp_path / "full", tmp_path / "out.jsonl").refused("holds no run")
    assert not (tmp_path / "full" / "recipe.toml").exists()


def test_what_the_system_refuses_ends_with_one_message(door: Door, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    door("sft", TINY, file / "out", "warm_start.steps=1").refused(f"stretto: {file}", "give another folder")
    told = Laboratory(tmp_path, file / "cache").run("train", TINY, "--dry-run")
    told.refused(f"stretto: {file / 'cache'}: the cache of", "Not a directory", "set STRETTO_CACHE")


def test_a_dry_run_says_all_and_starts_nothing(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = door("train", TINY, "rewards.function=final_answer", "--dry-run").well()
    assert not [part for part in ("6 steps: 12 prompts", "Qwen3ForCausalLM", "held out", "GiB") if part not in printed]
    assert printed.endswith("no problems found; nothing was started\n")
    assert list(tmp_path.iterdir()) == []


def test_sft_wants_a_warm_start_and_a_new_folder(door: Door, tmp_path: Path) -> None:
    door("sft", TINY, tmp_path / "out").refused("warm_start: missing", "`stretto sft` runs this section")
    door("sft", TINY, tmp_path, "warm_start.steps=1").refused(f"{tmp_path}: exists already; give a new folder")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["engine.slot=3"], "engine.slot: unknown key; did you mean 'slots'?"),
        (["engine.slots=0"], "engine.slots: 0"),
        (["trainer.steps=3"], "trainer.steps: is no setting here; give engine.key=value"),
        (["slots"], "slots: is no setting here"),
        (["engine.count=2"], "engine.count: has no meaning for a server; one engine is served"),
        (["engine.base_port=9"], "engine.base_port: has no meaning for a server; give --port"),
        (["engine.kind=vllm"], 'engine.kind: "vllm", and only the runs and evaluations of a recipe have another'),
        (["engine.kind=sglang"], 'allowed: "native"; vLLM and SGLang are servers themselves'),
        (["engine.python=/bin/python"], "engine.python: is given, and only the runs and evaluations"),
        (["engine.addresses=['a:1']"], "engine.addresses: is given, and only the runs and evaluations"),
    ],
)
def test_serve_takes_the_engines_settings_alone(door: Door, tmp_path: Path, words: list[str], expected: str) -> None:
    (tmp_path / "config.json").write_text("{}")  # paths are looked at first
    door("serve", tmp_path, *words).refused(expected)


def test_serve_refuses_a_folder_or_an_address_that_cannot_be(door: Door, tmp_path: Path) -> None:
    door("serve", tmp_path / "nowhere").refused("nowhere: no such folder")
    door("serve", tmp_path).refused("config.json: no such file", "holds no weights")
    door("serve", tmp_path, "--port", "70000").refused("Invalid value for '--port'")
    folder = tmp_path / "policy"
    build_policy(BuildConfig(), folder, seed=1)
    door("serve", folder, "--api-key", "a key").refused("--api-key: cannot be sent", "without spaces")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        door("serve", folder, "--port", port).refused(f"--port: 127.0.0.1:{port}: Address already in use")
    for host in ("192.0.2.1", "no.such.host.invalid"):
        door("serve", folder, "--host", host).refused(f"--host: {host}: ", "give an address of this machine")


def test_json_is_json_where_the_encoding_of_the_terminal_lacks_a_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding="ascii"))
    _open_streams()
    print(json.dumps("bär 😀", ensure_ascii=False), flush=True)
    assert json.loads(written.getvalue()) == "bär 😀"
