"""Promises about the code itself, held against docs/explanation/house.md.

- Imports go down: never to a neighbour, never upstairs, never hidden in a function (outside cli and `import stretto`).
- Rooms, and only these, stand where they are drawn; their names and their files' names say something.
- What only Linux has is asked for by one module for each ability.
- Rooms that say "no torch" load none; core needs the standard library, msgspec and numpy alone.
- Nothing is decided by the wall clock.
- Inside a room the same law holds; a folder is not crowded, a public class name is used once; concepts are counted.
- The loop loads no torch and reaches few modules; identifiers use the words of the glossary.
- Files and functions can be read at a glance; every third-party import is declared; every recipe loads.
- No file and no subprocess is read or written in the encoding of the locale.
- Each of these checkers catches a violation that is planted in a small house."""

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.house_law as law
from stretto.launch.recipe.recipe import load_recipe
from stretto_app.cli.main import app
from stretto_app.extensions.commands.preferences import load_preferences
from tests.launch.reference import recipe_table

ROOT = Path(__file__).parent.parent
#: The application, whose pyproject.toml is that of the repository; the others have theirs in their folder.
APPLICATION = ROOT / "application" / "stretto_app"
PACKAGES = sorted({path.parent for path in (ROOT / "packages").glob("*/stretto*/__init__.py")})
CORE = ROOT / "packages" / "core" / law.PACKAGE
ALL = [APPLICATION, *PACKAGES]
EACH = pytest.mark.parametrize("package", ALL, ids=lambda package: package.name)
LARGEST_LOOP = 75
MOST_MODULES = 190
HOUSE = law.read_house((ROOT / "docs" / "explanation" / "house.md").read_text(encoding="utf-8"))
REFUSED = law.refused_words((ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8"))
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


def assert_kept(violations: list[str]) -> None:
    assert not violations, "\n".join(["the law of the house (docs/explanation/house.md) is broken:", *violations])


def test_the_drawing_and_the_table_have_the_same_rooms() -> None:
    assert HOUSE.floors["core"] == 0
    assert HOUSE.roof == {"cli"}
    assert HOUSE.imports.keys() == HOUSE.floors.keys()
    assert {room.split("/")[0] for room in HOUSE.inside} <= HOUSE.floors.keys()


def test_the_table_allows_nothing_that_the_law_forbids() -> None:
    assert not [
        f"{room} -> {target}"
        for room, targets in HOUSE.imports.items()
        for target in targets
        if HOUSE.floors[target] >= HOUSE.floors[room]
    ]


Checker = Callable[[Path], list[str]]


def laws_of(house: law.House, refused: frozenset[str], declared: Callable[[Path], list[str]]) -> dict[str, Checker]:
    """The laws that a package keeps, by name."""
    return {
        "wrong_way": lambda package: law.wrong_way(package, house),
        "wrong_way_inside": lambda package: law.wrong_way_inside(package, house),
        "undrawn_inside": lambda package: law.undrawn_inside(package, house),
        "crowded": law.crowded,
        "same_names": law.same_names,
        "dialect": lambda package: law.dialect(package, refused),
        "unlisted": lambda package: law.unlisted(package, house),
        "deferred": lambda package: law.deferred(package, house),
        "nameless": law.nameless,
        "busy_doors": law.busy_doors,
        "of_linux": law.of_linux,
        "undeclared": lambda package: law.undeclared(package, declared(package)),
        "too_long": law.too_long,
        "by_wall_clock": law.by_wall_clock,
        "equal_digests": equal_digests,
        "wide": wide,
        "by_locale": by_locale,
    }


_DIGEST = re.compile(r"digest_of_tensor|TensorDigest")
_OF_A_DIGEST = re.compile(r"digest_of_tensor\(|(^|[._])digests?(\[.*\])?$|\.(checksum|sums)$")


def equal_digests(package: Path) -> list[str]:
    """Uses of == and != on digests of tensors, whose fields may be empty: `TensorDigest.agrees` compares them."""
    found = []
    for file in sorted(package.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if not _DIGEST.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
                continue
            if any(map(_OF_A_DIGEST.search, map(ast.unparse, (node.left, *node.comparators)))):
                found.append(f"{file.relative_to(package)}:{node.lineno}: {ast.unparse(node)}: digests `agree`")
    return found


#: Records that have the form of a file or a protocol: `inspect --json`, metrics.jsonl, OpenAI's Responses, a machine.
OUTER_FORMS = frozenset({"Inspection", "StepMetrics", "_ResponsesBody", "MachineProfile"})
MOST_FIELDS = 25


def wide(package: Path) -> list[str]:
    """Classes that declare more than 25 fields, unless someone outside decides their form."""
    found = []
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name not in OUTER_FORMS:
                fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
                if len(fields) > MOST_FIELDS:
                    place = f"{file.relative_to(package)}:{node.lineno}"
                    found.append(f"{place}: {node.name} has {len(fields)} fields; a class has {MOST_FIELDS} at most")
    return found


_TEXT_MODE = re.compile(r"(?!.*b)[rwax][+t]*")


def by_locale(package: Path) -> list[str]:
    """Calls that read or write text in the encoding of the locale: of a file, or of a subprocess."""
    found = []
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or "encoding" in (named := {one.arg: one.value for one in node.keywords}):
                continue
            called = ast.unparse(node.func)
            modes = [one.value for one in [*node.args[:2], named.get("mode")] if isinstance(one, ast.Constant)]
            by_default = called in ("open", "os.fdopen") and not any("b" in str(mode) for mode in modes)
            by_default |= called.endswith(".open") and any(_TEXT_MODE.fullmatch(str(mode)) for mode in modes)
            by_default |= called.endswith(".write_text") or (called.endswith(".read_text") and not node.args)
            if by_default or ast.unparse(named.get("text", ast.Constant(None))) == "True":
                found.append(f"{file.relative_to(package)}:{node.lineno}: {called} has no encoding: the locale decides")
    return found


def project_of(folder: Path) -> dict[str, Any]:
    """The table `project` of a folder's pyproject.toml."""
    found: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def dependencies_of(package: Path) -> list[str]:
    """Other packages of ours, and third parties."""
    project = project_of(ROOT if package == APPLICATION else package.parent)
    optional = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    return [*project["dependencies"], *optional]


LAWS = laws_of(HOUSE, REFUSED, dependencies_of)


@EACH
@pytest.mark.parametrize("name", sorted(LAWS.keys() - {"by_wall_clock"}))
def test_a_package_keeps_the_law(name: str, package: Path) -> None:
    """But `verify` imports inside of functions: its worker imports sympy when it is first asked to judge."""
    assert_kept([] if (name, package.name) == ("deferred", "stretto_verify") else LAWS[name](package))


@EACH
def test_no_wait_and_no_decision_is_by_the_wall_clock(package: Path) -> None:
    assert_kept(law.by_wall_clock(package))


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_files_and_functions_can_be_read_at_a_glance(folder: str) -> None:
    assert_kept(law.too_long(ROOT / folder))


def test_examples_name_the_encoding_of_their_files() -> None:
    assert_kept(by_locale(ROOT / "examples"))


@EACH
def test_concepts_are_counted_and_only_fall(package: Path) -> None:
    """A count that rises needs a decision, and a new number in docs/explanation/house.md."""
    text = (ROOT / "docs" / "explanation" / "house.md").read_text(encoding="utf-8")
    [counted] = re.findall(rf"^\| `{package.name}` \| (\d+) \| (\d+) \|$", text, flags=re.MULTILINE)
    assert tuple(map(str, law.concepts(package))) == counted, "say the new numbers in docs/explanation/house.md"


def test_recipe_keys_and_commands_are_counted_and_only_fall() -> None:
    text = (ROOT / "docs" / "explanation" / "house.md").read_text(encoding="utf-8")
    keys = sum(line.startswith("| `") for line in recipe_table().splitlines())
    commands = len(app.registered_commands) + len(app.registered_groups)
    assert f"A recipe has {keys} keys, the command line {commands} commands, " in text


def test_the_core_has_at_most_190_modules() -> None:
    """A door of a folder (`__init__.py`) is none."""
    modules = [path for path in law.sources(CORE) if path.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES, len(modules)


def test_ten_files_tell_the_whole_story_in_3_000_lines() -> None:
    text = (CORE.parent / "README.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| \d+ \| `(\S+)` \| ", text, flags=re.MULTILINE)
    assert len(files) == 10
    assert sum(len((CORE / file).read_text(encoding="utf-8").splitlines()) for file in files) < 3_000


def test_the_loop_reaches_few_modules_and_no_torch() -> None:
    names = [name for name in law.loaded_by(CORE, "stretto.loop.conductor") if name.startswith("stretto.")]
    modules = [name for name in names if not (CORE.parent / name.replace(".", "/")).is_dir()]
    assert len(modules) <= LARGEST_LOOP, modules


def test_every_room_is_drawn_and_every_drawn_room_is_built() -> None:
    assert_kept(law.undrawn([package for package in ALL if package.name != "stretto_verify"], HOUSE))


def test_core_stands_on_the_ground() -> None:
    assert_kept(law.heavy_core(CORE))


def test_light_rooms_load_no_torch() -> None:
    assert_kept(law.heavy(ALL, HOUSE))


def test_the_door_of_the_core_loads_no_torch() -> None:
    assert "torch" not in law.loaded_by(CORE, "stretto.run", "stretto.sections")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads(path: Path) -> None:
    load_preferences(path) if path.stem == "dpo" else load_recipe(path)


# The checkers themselves, on a small house with one violation planted.

SMALL_DRAWING = """
 roof      cli                     the door
 floor 1   model     rewards       the materials
 ground    core                    the words

| `cli` | door | core, model, rewards | no, until a command runs |
| `model` | tensors | core | yes |
| `rewards` | verdicts | nothing | no |
| `core` | words | nothing | no |

| `model` | load ▸ parts |
"""
SMALL = law.read_house(SMALL_DRAWING)
KEPT = {
    "core/__init__.py": "",
    "core/clock.py": "import time\n\nimport msgspec\n",
    "model/__init__.py": "",
    "model/load.py": "import torch\n\nfrom stretto.core import clock\n",
    "model/parts/__init__.py": "",
    "model/parts/layer.py": "class Layer: ...\n",
    "rewards/__init__.py": "",
    "rewards/maths.py": "import stretto.rewards.numbers\n",
    "rewards/numbers.py": "",
    "cli/__init__.py": "",
    "cli/main.py": "def train() -> None:\n    import stretto.model.load\n",
}


def build(folder: Path, files: dict[str, str]) -> Path:
    """A package `stretto` with these files, beside a `torch` that can be imported at no cost."""
    package = folder / law.PACKAGE
    for name, text in {"__init__.py": "", **KEPT, **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "torch.py").write_text("")
    return package


CHECKERS = laws_of(
    SMALL, law.refused_words("| `nursery`, pulse | fork server | |\n"), lambda _: ["torch", "msgspec"]
) | {
    "undrawn": lambda package: law.undrawn([package], SMALL),
    "heavy_core": law.heavy_core,
    "heavy": lambda package: law.heavy([package], SMALL),
}

#: By checker: the files that are planted, their text, and what is said of them.
PLANTED: dict[str, list[tuple[str, str, str]]] = {
    "wrong_way": [
        ("core/up.py", "import stretto.model.load\n", "core/up.py:1: core (floor 0) imports model (floor 1)"),
        ("model/side.py", "\nfrom stretto import rewards\n", "model/side.py:2: model (floor 1) imports rewards"),
        ("model/dots.py", "from ..rewards import maths\n", "model/dots.py:1: model (floor 1) imports rewards"),
        ("model/up.py", "if TYPE_CHECKING:\n    from stretto_app.cli.main import train\n", "model/up.py:2: model"),
        ("model/text.py", "import_module('stretto.cli.main')\n", "model (floor 1) imports cli (floor 2)"),
    ],
    "wrong_way_inside": [
        ("model/parts/up.py", "from stretto.model import load\n", "parts imports load, not on a floor")
    ],
    "undrawn_inside": [
        ("model/loose.py", "", "model/loose: has no floor"),
        ("rewards/deep/one.py", "", "rewards/deep: a sub-room of a room without floors"),
    ],
    "crowded": [
        ("rewards/maths_one.py,rewards/maths_two.py", "", "rewards: 3 files begin with 'maths'"),
        (",".join(f"core/{letter}.py" for letter in "abcdefghijklmn"), "", "core: 15 files; a folder has 14 at most"),
    ],
    "same_names": [
        ("core/layers.py", "class Layer: ...\n", "class Layer is in core/layers.py and model/parts/layer.py")
    ],
    "dialect": [
        ("core/roles.py", "def leave_nursery(): ...\n", "core/roles.py:1: leave_nursery: the glossary refuses")
    ],
    "unlisted": [
        ("rewards/timed.py", "from stretto.core.clock import time\n", "does not say that rewards imports core")
    ],
    "deferred": [
        ("model/late.py", "def load():\n    import json\n", "model/late.py:2: imports json inside a function"),
        ("model/late.py", "async def load():\n    import json\n", "imports json inside a function"),
    ],
    "undrawn": [("attic/box.py", "", "attic: built but not drawn")],
    "nameless": [
        ("rewards/text_utils.py", "", "rewards/text_utils.py: a name that says nothing"),
        ("model/helpers/one.py", "", "model/helpers: a name that says nothing"),
    ],
    "busy_doors": [("model/__init__.py", "from stretto.model import load\n", "model/__init__.py:1")],
    "heavy_core": [("core/fast.py", "import torch\n", "core/fast.py:1: core imports torch")],
    "of_linux": [
        (
            "rewards/kernel.py",
            "import os\nfile = os.memfd_create('x')\n",
            "rewards/kernel.py:2: memfd_create is for the modules of Linux",
        ),
        ("rewards/loop.py", "import uvloop\n", "rewards/loop.py:1: uvloop is for"),
        ("rewards/mac.py", "import sys\nmac = sys.platform == 'darwin'\n", "rewards/mac.py:2: sys.platform is for"),
        ("rewards/memory.py", "file = f'/proc/{pid}/statm'\n", "rewards/memory.py:1: /proc is for"),
        ("rewards/quota.py", "file = '/sys/fs/cgroup/cpu.max'\n", "rewards/quota.py:1: /sys is for"),
    ],
    "undeclared": [
        ("rewards/web.py", "import requests.adapters\n", "imports requests, which is no dependency"),
        ("core/up.py", "from stretto_report import check\n", "imports stretto_report, which is no dependency"),
        ("core/up.py", "from stretto_verbs import loss\n", "imports stretto_verbs, which is no dependency"),
        ("core/up.py", "from stretto_workflows import pool\n", "imports stretto_workflows, which is no dependency"),
    ],
    "too_long": [
        ("rewards/long.py", "\n" * 481, "rewards/long.py: 481 lines"),
        ("rewards/long.py", "def run():\n" + "    pass\n" * 60, "long.py:1: run has 61 lines"),
    ],
    "equal_digests": [
        ("rewards/proof.py", "late = digest_of_tensor(one) != digest\n", "rewards/proof.py:1: digest_of_tensor(one)"),
        ("rewards/proof.py", "TensorDigest\nlate = a.checksum == b\n", "rewards/proof.py:2: a.checksum == b"),
    ],
    "wide": [
        (
            "rewards/record.py",
            "class Verdict:\n" + "".join(f"    field_{number}: int\n" for number in range(26)),
            "rewards/record.py:1: Verdict has 26 fields",
        )
    ],
    "by_locale": [
        ("rewards/text.py", "said = path.read_text(errors='replace')\n", "rewards/text.py:1: path.read_text has no"),
        ("rewards/text.py", "open(0, 'rb')\nfile = open(path)\n", "rewards/text.py:2: open has no encoding"),
        ("rewards/text.py", "path.open('rb')\npath.open('a')\n", "rewards/text.py:2: path.open has no encoding"),
        ("rewards/text.py", "run(words, text=True)\n", "rewards/text.py:1: run has no encoding"),
    ],
    "by_wall_clock": [("rewards/slow.py", "late = time.time() > 9\n", "rewards/slow.py:1: time.time may jump")],
    "heavy": [("rewards/learned.py", "from stretto.model import load\n", "rewards: importing it loads torch")],
}


@pytest.mark.parametrize("checker", CHECKERS.values(), ids=CHECKERS.keys())
def test_a_kept_law_gives_no_violation(checker: Checker, tmp_path: Path) -> None:
    assert checker(build(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("checker", "file", "text", "sentence"),
    [(name, *one) for name, planted in PLANTED.items() for one in planted],
    ids=lambda value: str(value)[:30].strip(),
)
def test_a_planted_breach_is_named_by_place(checker: str, file: str, text: str, sentence: str, tmp_path: Path) -> None:
    violations = CHECKERS[checker](build(tmp_path, dict.fromkeys(file.split(","), text)))
    assert len(violations) == 1
    assert sentence in violations[0]


def test_a_room_that_was_drawn_and_is_not_there_is_named(tmp_path: Path) -> None:
    assert law.undrawn([build(tmp_path, {})], HOUSE)[0] == "audit: drawn but not built"


def test_a_docstring_does_not_count_as_length(tmp_path: Path) -> None:
    body = '    """' + "\n" * 50 + '    """\n' + "    pass\n" * 59
    assert law.too_long(build(tmp_path, {"rewards/long.py": "def run():\n" + body})) == []
