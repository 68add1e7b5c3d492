"""The law of paths for commands: each of them answers a path that cannot be used with one line and exit code 2, before
anything starts."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto_app.cli import main as commands
from tests.api.test_paths import paths_in
from tests.launch.running import ROOT

#: Words of each command whose first path is a recipe, a model, a run or a file to read.
COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "train": lambda path: ["train", path],
    "train --dry-run": lambda path: ["train", path, "--dry-run"],
    "train --resume": lambda path: ["train", "--resume", path],
    "sft": lambda path: ["sft", path, "policy"],
    "dpo": lambda path: ["dpo", path, "policy"],
    "eval": lambda path: ["eval", path, "--task", str(ROOT / "recipes" / "arithmetic.toml")],
    "serve": lambda path: ["serve", path],
    "gateway": lambda path: ["gateway", path],
    "tinker": lambda path: ["tinker", path],
    "plan": lambda path: ["plan", path, "--gpu", "h100"],
    "study": lambda path: ["study", path],
    "inspect": lambda path: ["inspect", path],
    "check": lambda path: ["check", path],
    "diff": lambda path: ["diff", path, path],
    "export": lambda path: ["export", path],
    "replay": lambda path: ["replay", path],
    "watch": lambda path: ["watch", path],
}
#: What no command line can hold.
IMPOSSIBLE = ("NUL", "no text")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_that_cannot_be_used_is_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, path in paths_in(tmp_path / "paths").items():
        if kind in IMPOSSIBLE:
            continue
        monkeypatch.setattr(sys, "argv", ["stretto", *COMMANDS[name](path)])
        with pytest.raises(SystemExit) as ended:
            commands.main()
        told = capfdbinary.readouterr().err.decode()
        lines = [line for line in told.splitlines() if line.startswith("stretto: ")]
        assert (ended.value.code, len(lines)) == (2, 1), (kind, told)
        assert path[:40] in lines[0], (kind, told)
        assert "Traceback" not in told, (kind, told)
