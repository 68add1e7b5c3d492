"""What users suffered: a command of the documentation does not work as it is written, or is not there (verl#2804).

Promise: every command in a block of the pages is executed here, as it is written but for its size: on a tiny model, for
a few steps, at a free port. Others say above their block what they need, or which test runs them, in a comment that
readers do not see:

    <!-- needs WHAT [for THE BEGINNING OF A COMMAND] -->        <!-- run by FILE:TEST [for ...] -->
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import polars
import pytest

from stretto_foresight.planner.machine import machine_of
from tests.gateway.serving import build_chat_model
from tests.launch.running import ROOT, Laboratory, service
from tests.test_docs import names_in

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QWEN = ROOT / "tests" / "data" / "models" / "qwen2.5_7b"  # a config.json
_BLOCK = re.compile(r"((?:^<!-- [^\n]* -->\n)*)^```([a-z]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NOTE = re.compile(r"<!-- (needs|run by) (.+?)(?: for (.+))? -->")
_COMMAND = re.compile(
    r"^(?:\$ )?((?:[A-Z_]+=\S+ )*(?:stretto|make|pip|python3?|openssl|sbatch|mkdir|ln|/\S+/python) [a-z-].*)$"
)
_SHOWN = re.compile(r"^stretto [a-z]+: ")  # what a command prints
_TINY = "rollout.batch_size=1 rollout.group_size=4 task.held_out=2 evaluation.prompts=2 sampling.max_tokens=8"
_ARITHMETIC = f"{_TINY} warm_start.steps=2 trainer.steps=2 task.prompts=64 task.demonstrations=64"
#: Words that make a command small, by how it begins.
SMALLER = {
    "stretto train recipes/from_hf.toml": f"{_TINY} trainer.steps=1 rollout.filter=none",
    "stretto train my_recipe.toml": f"{_TINY} trainer.steps=2",
    "stretto train recipes/arithmetic.toml": _ARITHMETIC,
    "stretto plan recipes/arithmetic.toml": _ARITHMETIC,
    "stretto plan recipes/sglang_8gpu.toml": "trainer.steps=3 rollout.batch_size=4 rollout.group_size=4 "
    "rollout.max_in_flight=8",
    "stretto eval": "sampling.max_tokens=4",
    "stretto eval runs/mine": "evaluation.prompts=2",
}
#: What a command that serves says when it does.
SERVING = {"serve": "serving at ", "gateway": "gateway at ", "watch": "stretto watch: "}


@dataclass(frozen=True)
class Documented:
    """A command of a page."""

    page: str
    text: str
    notes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"


def documented(page: Path) -> Iterator[Documented]:
    for notes, language, block in _BLOCK.findall(page.read_text(encoding="utf-8")):
        told = _NOTE.findall(notes)
        for line in "" if language not in ("", "bash") else block.replace("\\\n", " ").splitlines():
            if (found := _COMMAND.match(line)) and not _SHOWN.match(line):
                text = re.split(r"\s+#\s", found[1])[0].strip()
                yield Documented(
                    page.name, text, tuple((kind, what) for kind, what, begins in told if text.startswith(begins))
                )


COMMANDS = [command for page in PAGES for command in documented(page)]
#: A run that other pages look at comes before them.
RUN_HERE = sorted((one for one in COMMANDS if not one.notes), key=lambda one: one.page != "planner.md")


@dataclass
class Place:
    """The folder in which all commands are run, as a user would have it; each is run once."""

    folder: Path
    laboratory: Laboratory
    done: dict[str, str] = field(default_factory=dict)

    def run(self, text: str) -> None:
        """
        Raises:
            AssertionError: it did not end well; with what it said.
        """
        if text in self.done:
            return
        if not text.startswith("stretto "):
            subprocess.run(["bash", "-ec", text], cwd=self.folder, check=True, capture_output=True, timeout=60)
            self.done[text] = ""
            return
        words = self._words(text)
        if words[0] in SERVING:
            self._serve(words)
        else:
            ended = self.laboratory.run(*words)
            assert ended.code == 0, (text, ended.out, ended.err)
        self.done[text] = " ".join(words)
        if text == "stretto train my_recipe.toml --run-dir runs/mine":
            (self.folder / "runs/mine/policy/v000200").symlink_to("v000002")

    def _words(self, text: str) -> list[str]:
        text = re.sub(r"\[[a-z]+\.key=value \.\.\.\]|(?<= )\[(?=--)|(?<=\w)\](?= |$)", "", text).replace("~", "home")
        smaller = [words for begins, words in SMALLER.items() if text.startswith(begins)]
        model = QWEN if text.startswith("stretto plan") else self.folder / "MODEL_DIR"
        return shlex.split(" ".join([text, *smaller]).replace("MODEL_DIR", str(model)))[1:]

    def _serve(self, words: list[str]) -> None:
        """Until it serves, and then until it is stopped."""
        if "--port" in words:
            words[words.index("--port") + 1] = "0"
        else:
            words += ["--port", "0"]
        words += ["--no-open"] if words[0] == "watch" else []
        names = {str(one.relative_to(self.folder)): str(one) for one in self.folder.glob("runs/**/v*")}
        words = [names.get(word, str(self.folder / word) if word in ("runs", "sessions") else word) for word in words]
        with service(*words, serving=SERVING[words[0]]) as (process, _):
            process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture(scope="module")
def place(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("documented")
    for name in ("recipes", "tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    build_chat_model(folder / "MODEL_DIR")
    (folder / "home" / "models").mkdir(parents=True)
    (folder / "home" / "models" / "Qwen3-0.6B").symlink_to(folder / "MODEL_DIR")
    rows = [{"prompt": f"{one}+1=", "answer": str(one + 1)} for one in range(80)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "questions.csv").open("w") as file:
        written = csv.DictWriter(file, ["question", "answer"])
        written.writeheader()
        written.writerows({"question": row["prompt"], "answer": row["answer"]} for row in rows[:2])
    gsm8k = {
        "question": [row["prompt"] for row in rows[:2]],
        "answer": [f"so\n#### {row['answer']}" for row in rows[:2]],
    }
    polars.DataFrame(gsm8k).write_parquet(folder / "test.parquet")
    (folder / "FILE.jsonl").write_text(
        json.dumps({"completion": "```python\nprint(4)\n```", "tests": [{"stdin": "", "stdout": "4"}]})
    )
    (folder / "machine.json").write_bytes(msgspec.json.encode(machine_of("h100")))
    own_model = (ROOT / "docs" / "tutorials" / "own_model.md").read_text()
    blocks = dict(re.findall(r"^```(python|toml)\n(.*?)^```", own_model, re.MULTILINE | re.DOTALL))
    (folder / "my_rewards.py").write_text(blocks["python"])
    (folder / "my_recipe.toml").write_text(blocks["toml"].replace("~", "home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield Place(folder, laboratory)


def test_each_note_says_what_is_there_and_is_of_use() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        notes = [
            (kind, what, begins) for notes, *_ in _BLOCK.findall(text) for kind, what, begins in _NOTE.findall(notes)
        ]
        assert len(notes) == len(_NOTE.findall(text)), f"{page.name}: a note that is above no block"
        used = {note for command in COMMANDS if command.page == page.name for note in command.notes}
        assert {(kind, what) for kind, what, _ in notes} == used, page.name
    for command in COMMANDS:
        for kind, what in command.notes:
            if kind == "run by":
                file, _, name = what.partition(":")
                assert name in names_in(ROOT / file), command
    assert len(COMMANDS) > 50


@pytest.mark.parametrize("command", RUN_HERE, ids=str)
def test_a_command_of_the_pages_does_what_it_says(command: Documented, place: Place) -> None:
    """Behind those that stand before it on its page, and a run of another page that it looks at."""
    pages = (command.page, "planner.md") if "runs/first" in command.text else (command.page,)
    before = RUN_HERE[: RUN_HERE.index(command)]
    for one in (*(other for other in before if other.page in pages), command):
        place.run(one.text)
