"""What users suffered: a command of the documentation does not work as it is written, or is not there (verl#2804).

Promises, of the README, every page of docs/ and every README of a package:

- a fenced block says what it holds: commands (`bash`), Python, TOML, JSON, or text that nobody executes;
- every command and every block of Python is executed here, as it is written but for its size (a tiny model, a few
  steps, a free port), or stands under a comment that readers do not see, with its needs or the test that runs it:

    <!-- needs WHAT [for THE BEGINNING OF A COMMAND] -->        <!-- run by FILE:TEST [for ...] -->

- TOML and JSON can be read, and text holds no command."""

import csv
import json
import re
import shlex
import signal
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import polars
import pytest

from stretto import run as orders
from stretto_foresight.planner.machine import machine_of
from stretto_verify.cli import main as verify
from tests.api.conftest import warm_process
from tests.gateway.serving import build_chat_model
from tests.launch.running import ROOT, Laboratory, service
from tests.test_docs import names_in

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "application" / "README.md",
    *sorted((ROOT / "packages").glob("*/README.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md"),
]
QWEN = ROOT / "tests" / "data" / "models" / "qwen2.5_7b"  # a config.json
LANGUAGES = {"bash", "python", "toml", "json", "text"}
_BLOCK = re.compile(r"((?:^ *<!-- [^\n]* -->\n)*)^( *)```([^\n]*)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL)
_NOTE = re.compile(r"<!-- (needs|run by) (.+?)(?: for (.+))? -->")
_COMMAND = re.compile(
    r"^\$? ?(?:[A-Z_]+=\S+ )*(?:stretto|stretto-verify|make|pip|python3?|sbatch|openssl) [\w./-]", re.M
)
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
    "stretto eval MODEL_DIR --data reasoning-gym": "source.size=8",
}
#: What stands in place of a text of Python that would take minutes.
SMALLER_PYTHON = {
    '"recipes/arithmetic.toml"': '"recipe.toml"',
    '{"steps": 100}': '{"steps": 2}',
    '"v000100"': '"v000002"',
}
SMALL_RECIPE = {
    "max_tokens = 512": "max_tokens = 8",
    "batch_size = 8 ": "batch_size = 1 ",
    "group_size = 8 ": "group_size = 4 ",
    "steps = 200": "steps = 2",
    'file = "questions.jsonl"': 'file = "questions.jsonl"\nheld_out = 2',
}
#: What a command that serves says when it does.
SERVING = {"serve": "serving at ", "gateway": "gateway at ", "watch": "stretto watch: "}
_SERVED = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Documented:
    """A command of a page, or a block of Python."""

    page: Path
    language: str
    text: str
    notes: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.partition(chr(10))[0][:60]}"


@dataclass(frozen=True)
class Block:
    """A fenced block with the comments above it."""

    notes: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(notes, language, textwrap.dedent(text)) for notes, _, language, text in found]


def documented(page: Path) -> Iterator[Documented]:
    for block in blocks(page):
        told = _NOTE.findall(block.notes)
        texts = [block.text] if block.language == "python" else []
        if block.language == "bash":
            lines = block.text.replace("\\\n", " ").splitlines()
            texts = [text for line in lines if (text := re.split(r"(?:^|\s+)#\s", line)[0].strip())]
        for text in texts:
            notes = tuple((kind, what) for kind, what, begins in told if text.startswith(begins))
            yield Documented(page, block.language, text, notes)


ALL = [one for page in PAGES for one in documented(page)]
FIRST_RUN = ROOT / "docs" / "tutorials" / "first_run.md"  # other pages look at its run
RUN_HERE = sorted((one for one in ALL if not one.notes), key=lambda one: one.page != FIRST_RUN)


@dataclass
class Place:
    """The folder in which everything is run, as a user would have it; each text is run once."""

    folder: Path
    laboratory: Laboratory
    done: set[tuple[Path | None, str]] = field(default_factory=set)
    names: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def run(self, one: Documented) -> None:
        """
        Raises:
            AssertionError: it did not end well; with what it said.
        """
        key = (one.page if one.language == "python" else None, one.text)
        if key in self.done:
            return
        self.done.add(key)
        if one.language == "python":
            self._execute(one)
        elif one.text.startswith("stretto "):
            self._stretto(one.text)
        elif one.text.startswith("stretto-verify "):
            assert verify(shlex.split(one.text)[1:]) == 0, one.text
        else:
            subprocess.run(["bash", "-ec", one.text], cwd=self.folder, check=True, capture_output=True, timeout=60)

    def _execute(self, one: Documented) -> None:
        """Behind the blocks before it on its page, in one namespace."""
        text = one.text
        for whole, small in SMALLER_PYTHON.items():
            text = text.replace(whole, small)
        names = self.names.setdefault(one.page, {"__name__": "documented"})
        if _SERVED not in text:
            exec(compile(text, str(one.page), "exec"), names)
            return
        words = ("serve", self.folder / "MODEL_DIR", "--name", "NAME", "--port", "0")
        with service(*words, serving=SERVING["serve"]) as (_, said):
            address = said[-1].split()[-1].removesuffix("/v1")
            exec(compile(text.replace(_SERVED, address), str(one.page), "exec"), names)

    def _stretto(self, text: str) -> None:
        words = self._words(text)
        if words[0] in SERVING:
            self._serve(words)
        else:
            ended = self.laboratory.run(*words)
            assert ended.code == 0, (text, ended.out, ended.err)
        if text == "stretto train my_recipe.toml --run-dir runs/mine":
            (self.folder / "runs/mine/policy/v000200").symlink_to("v000002")

    def _words(self, text: str) -> list[str]:
        text = re.sub(r"\[[a-z]+\.key=value \.\.\.\]|(?<= )\[(?=--)|(?<=\w)\](?= |$)", "", text).replace("~", "home")
        text = re.sub(r"(?<= --n )\d+", "2", text)  # completions of each question
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


def write_files(folder: Path) -> None:
    """What the pages suppose: models, questions, completions, a measured machine, and the tutorial's own files."""
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
    program = {"completion": "```python\nprint(4)\n```", "tests": [{"stdin": "", "stdout": "4"}]}
    answer = {"completion": r"It is $\frac12$.", "gold": "0.5"}
    (folder / "FILE.jsonl").write_text(json.dumps(program))
    (folder / "answers.jsonl").write_text(json.dumps(answer))
    (folder / "completions.jsonl").write_text(json.dumps(program | {"gold": "4"}))
    (folder / "machine.json").write_bytes(msgspec.json.encode(machine_of("h100")))
    tutorial = {block.language: block.text for block in blocks(ROOT / "docs" / "tutorials" / "own_model.md")}
    (folder / "my_rewards.py").write_text(tutorial["python"])
    recipe = tutorial["toml"].replace("~", "home")
    (folder / "my_recipe.toml").write_text(recipe)
    for whole, small in SMALL_RECIPE.items():
        assert whole in recipe
        recipe = recipe.replace(whole, small)
    (folder / "recipe.toml").write_text(recipe)


@pytest.fixture(scope="module")
def place(laboratory: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("documented")
    for name in ("recipes", "tests", "examples"):
        (folder / name).symlink_to(ROOT / name)
    write_files(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("STRETTO_CACHE", str(laboratory.cache))
        patch.setattr(orders, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": warm_process}))
        yield Place(folder, laboratory)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_says_what_it_holds_and_holds_it(page: Path) -> None:
    found = blocks(page)
    assert len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(found)
    assert {block.language for block in found} <= LANGUAGES
    for block in found:
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            for line in block.text.splitlines():
                json.loads(line)
        elif block.language == "text":
            assert not _COMMAND.findall(block.text), "a command is in a block of commands"


def test_each_note_says_what_is_there_and_is_of_use() -> None:
    for page in PAGES:
        told = [(kind, what) for block in blocks(page) for kind, what, _ in _NOTE.findall(block.notes)]
        assert len(told) == len(_NOTE.findall(page.read_text(encoding="utf-8"))), (
            f"{page}: a note that is above no block"
        )
        assert set(told) == {note for one in ALL if one.page == page for note in one.notes}, page
    for one in ALL:
        for kind, what in one.notes:
            if kind == "run by":
                file, _, name = what.partition(":")
                assert name in names_in(ROOT / file), one
    assert len(ALL) > 80


@pytest.mark.parametrize("one", RUN_HERE, ids=str)
def test_what_stands_on_a_page_does_what_it_says(one: Documented, place: Place) -> None:
    """Behind what stands before it on its page, and a run of another page that it looks at."""
    pages = {one.page, FIRST_RUN} if "runs/first" in one.text else {one.page}
    for other in RUN_HERE[: RUN_HERE.index(one)]:
        if other.page in pages:
            place.run(other)
    place.run(one)
