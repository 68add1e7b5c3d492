"""The law of the house as functions: the drawing of docs/explanation/house.md on one side, the imports on the other.

Every checker takes the folder of a package, or of all packages, and returns violations, one readable sentence each; an
empty list is a kept law. Nothing is imported to be checked, except by `loaded_modules`, which asks a fresh interpreter.
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "stretto"  # the core, which imports as this
#: Packages whose folders are rooms; each other one, such as `stretto_gateway`, is one room, named `gateway`.
OF_ROOMS = frozenset({PACKAGE, "stretto_app", "stretto_report", "stretto_foresight"})
#: Packages with names of `import stretto`, which are loaded when they are asked for.
ON_DEMAND = frozenset({"stretto_app", "stretto_verbs", "stretto_workflows"})
NAMES_OF_NOTHING = frozenset({"utils", "util", "common", "helpers", "helper", "misc"})
HEAVY = ("torch", "transformers")
CORE_MAY_IMPORT = frozenset({"msgspec", "numpy", "xxhash"})
LONGEST_FUNCTION = 60
MOST_FILES = 14
LONGEST_FILE = 480
WALL_CLOCK = frozenset({"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"})
#: Where the date is written down for a reader, and nothing is decided by it.
WRITES_DATES = frozenset(
    {"gateway/agents/groups", "gateway/app", "gateway/sessions/sessions", "store/ledger/ledger", "tinker/dates"}
)
#: The modules that may ask for what only Linux has, one for each ability; `verify` stands alone.
OF_LINUX: Mapping[str, str] = {
    "cluster/weights/splicing": "F_SETPIPE_SZ sys.platform",
    "core/machine": "sched_getaffinity sys.platform CDLL /proc /sys",
    "forking/command_line": "prctl CDLL /proc",
    "processes/event_loop": "uvloop",
    "processes/kernel": "prctl pidfd_open pidfd_send_signal waitid mallopt memfd_create TCP_KEEPIDLE TCP_USER_TIMEOUT "
    "sys.platform CDLL",
    "processes/tree": "/proc",
    "verify/sandbox/cgroups": "/proc",
    "verify/sandbox/guest": "pidfd_open setresuid setresgid O_PATH sys.platform CDLL",
    "verify/sandbox/kernel": "memfd_create O_PATH sys.platform",
    "verify/sandbox/probe": "/dev/shm",
    "verify/sandbox/sandbox": "/proc",
    "verify/sandbox/walls": "CDLL",
    "weights/folder": "/dev/shm",
}
_OF_LINUX_ALONE = re.compile(r"(/proc|/sys|/dev/shm|sys\.platform)(?![^/])")


@dataclass(frozen=True)
class House:
    """The drawing: on which floor each room is, which rooms it may import today, and whether it may load torch."""

    floors: Mapping[str, int]  # room -> 0 (ground) upwards
    roof: frozenset[str]  # the rooms on top of a package: the only ones with deferred imports
    imports: Mapping[str, frozenset[str]]
    light: frozenset[str]  # rooms that must not load torch
    inside: Mapping[str, Mapping[str, int]]  # room or sub-room -> file or sub-room in it -> floor, 0 upwards


def read_house(text: str) -> House:
    """The house that a document draws (``floor 1   model   rewards   the materials``) and lists in its table."""
    drawn = re.findall(r"^ *(roof|floor \d+|ground) {2,}(.+)$", text, flags=re.MULTILINE)
    # Rooms stand two or more spaces apart; the last cell of a floor is its remark.
    rooms = [re.split(r" {2,}", cells.strip())[:-1] for _, cells in reversed(drawn)]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\| *((?:yes|no)[^|]*)\|$", text, flags=re.MULTILINE)
    inside = re.findall(r"^\| `([\w/]*\w)` \|([^|]*)\|$", text, flags=re.MULTILINE)
    return House(
        floors={room: floor for floor, names in enumerate(rooms) for room in names},
        roof=frozenset(
            room for names, (name, _) in zip(rooms, reversed(drawn), strict=True) if name == "roof" for room in names
        ),
        imports={room: frozenset(re.findall(r"\w+", allowed)) - {"nothing"} for room, allowed, _ in rows},
        light=frozenset(room for room, _, torch in rows if torch.strip().startswith("no")),
        inside={
            room: {name: floor for floor, names in enumerate(reversed(floors.split("▸"))) for name in names.split()}
            for room, floors in inside
        },
    )


def inside(name: str) -> tuple[str, ...]:
    """Room, sub-rooms and file of a module of ours; empty for a package of rooms itself, and for what is not ours.

    Example: ``stretto.engine.wire`` is ``("engine", "wire")``, ``stretto_gateway.app`` is ``("gateway", "app")``."""
    top, *rest = name.split(".")
    if top in OF_ROOMS:
        return tuple(rest)
    return (top.removeprefix("stretto_"), *rest) if top.startswith("stretto_") else ()


def rooms_of(package: Path) -> dict[str, Path]:
    """The folder of each room of a package."""
    if package.name not in OF_ROOMS:
        return {package.name.removeprefix("stretto_"): package}
    return {path.name: path for path in package.iterdir() if path.is_dir() and any(path.glob("*.py"))}


@dataclass(frozen=True)
class Import:
    """One import: ``from stretto.core import clock`` has the names ``stretto.core`` and ``stretto.core.clock``."""

    package: str
    path: Path  # of the importing file, below the package folder
    line: int
    names: tuple[str, ...]
    deferred: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """Room, sub-rooms and file that import."""
        return inside(".".join((self.package, *self.path.with_suffix("").parts)))

    @property
    def room(self) -> str:
        """The importing room; empty for a file that stands directly in a package of rooms."""
        return self.parts[0] if len(self.parts) > 1 else ""

    @property
    def rooms(self) -> frozenset[str]:
        """The rooms that are imported."""
        return frozenset(parts[0] for name in self.names if (parts := inside(name)))

    @property
    def third_party(self) -> str:
        """The imported top-level package when it is neither its own nor the standard library; else empty."""
        top = self.names[0].split(".")[0]
        return "" if top == self.package or top in sys.stdlib_module_names else top

    @property
    def place(self) -> str:
        return f"{self.package}/{self.path}:{self.line}"


def sources(package: Path) -> list[Path]:
    """The Python files of a folder; what stands in hidden folders (environments, caches) is not ours."""
    return sorted(
        path
        for path in package.rglob("*.py")
        if not any(part.startswith((".", "__py")) for part in path.relative_to(package).parts[:-1])
    )


def imports(package: Path) -> list[Import]:
    """Every import of the package, those under ``if TYPE_CHECKING`` and inside functions included."""
    return [found for _, code in codes(package) for found in code.imports]


@dataclass(frozen=True)
class Code:
    """What the laws ask of a file, found in one walk through it."""

    imports: tuple[Import, ...]
    classes: tuple[tuple[str, bool], ...]  # public ones, and whether they are Protocols
    names: Mapping[str, frozenset[int]]  # the identifiers and folders of the kernel, and their lines
    clocks: tuple[tuple[int, str], ...]  # uses of the wall clock


@cache
def read_code(path: Path, text: str, package: Path) -> Code:
    """Of a file with this text; imports are those of a file of the package."""
    tree, names = ast.parse(text), dict[str, set[int]]()
    clocks, imported = list[tuple[int, str]](), list[Import]()
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, deferred in waiting:
        kind = type(node)
        if (field := _NAMED.get(kind.__name__)) is not None and (name := getattr(node, field)) is not None:
            names.setdefault(name, set()).add(getattr(node, "lineno", 0))
        said = ast.unparse(node) if kind is ast.Attribute and name == "platform" else getattr(node, "value", None)
        if isinstance(said, str) and (of := _OF_LINUX_ALONE.match(said)):
            names.setdefault(of[0], set()).add(getattr(node, "lineno", 0))
        if kind in _IMPORTING and (modules := _imported_names(node, path, package)):
            imported.append(Import(package.name, path.relative_to(package), node.lineno, modules, deferred))  # type: ignore[attr-defined]
        elif kind is ast.Attribute and name in _CLOCKS and (used := ast.unparse(node)).endswith(tuple(WALL_CLOCK)):
            clocks.append((node.lineno, used))  # type: ignore[attr-defined]
        inside = deferred or kind in _FUNCTIONS
        waiting.extend([(child, inside) for child in ast.iter_child_nodes(node)])
    classes = tuple(
        (node.name, any("Protocol" in ast.unparse(base) for base in node.bases))
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    lines = {name: frozenset(found) for name, found in names.items()}
    return Code(tuple(imported), classes, lines, tuple(clocks))


def codes(package: Path) -> Iterator[tuple[Path, Code]]:
    """The files of a folder and what is in them."""
    for path in sources(package):
        yield path, read_code(path, path.read_text(encoding="utf-8"), package)


_CLOCKS = frozenset(clock.rpartition(".")[2] for clock in WALL_CLOCK)
_FUNCTIONS = frozenset({ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda})
_IMPORTING = frozenset({ast.Import, ast.ImportFrom, ast.Call})
#: The field with the name that a node gives or uses.
_NAMED = {"Name": "id", "Attribute": "attr", "arg": "arg", "keyword": "arg"}
_NAMED |= dict.fromkeys(("FunctionDef", "AsyncFunctionDef", "ClassDef"), "name")
_NAMED |= dict.fromkeys(("ExceptHandler", "MatchAs", "MatchStar", "alias"), "name")


def _imported_names(node: ast.AST, path: Path, package: Path) -> tuple[str, ...]:
    """What a node imports, as absolute names; ``import_module("a.b")`` with a literal counts as an import."""
    match node:
        case ast.Import(names=aliases):
            return tuple(alias.name for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases, level=level):
            above = (package.name, *path.relative_to(package).parts[:-1])
            base = ".".join((*above[: len(above) - level + 1], *filter(None, [module]))) if level else str(module)
            return (base, *(f"{base}.{alias.name}" for alias in aliases))
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return (name,)
    return ()


def wrong_way(package: Path, house: House) -> list[str]:
    """Imports of a neighbour or of a higher floor."""
    floors = house.floors
    return [
        f"{found.place}: {found.room} (floor {floors[found.room]}) imports {target} (floor {floors[target]})"
        for found in imports(package)
        for target in sorted(found.rooms - {found.room})
        if found.room in floors and target in floors and floors[target] >= floors[found.room]
    ]


def wrong_way_inside(package: Path, house: House) -> list[str]:
    """Imports of a neighbour or of a higher floor within a room that has floors of its own."""
    violations: list[str] = []
    for found in imports(package):
        parts = found.parts
        for room, floors in house.inside.items():
            depth = len(room.split("/"))
            if "/".join(parts[:depth]) != room or len(parts) == depth:
                continue
            folder = package.joinpath(*parts[len(parts) - len(found.path.parts) : depth])
            for name in found.names:
                target = inside(name)
                if "/".join(target[:depth]) != room or len(target) == depth or target[depth] == parts[depth]:
                    continue
                own, other = floors.get(parts[depth]), floors.get(target[depth])
                files = all((folder / f"{entry}.py").is_file() for entry in (parts[depth], target[depth]))
                if own is not None and other is not None and other >= own + files:
                    violations.append(f"{found.place}: {parts[depth]} imports {target[depth]}, not on a floor below it")
    return sorted(set(violations))


def undrawn_inside(package: Path, house: House) -> list[str]:
    """Files and sub-rooms of a room with floors that have none, and floors of what is not there."""
    violations: list[str] = []
    rooms = rooms_of(package)
    for room, floors in house.inside.items():
        top, *below = room.split("/")
        if top not in rooms:
            continue
        folder = rooms[top].joinpath(*below)
        built = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        built |= {path.name for path in folder.iterdir() if path.is_dir() and any(path.glob("*.py"))}
        violations += [f"{room}/{name}: has no floor" for name in sorted(built - floors.keys())]
        violations += [f"{room}/{name}: has a floor and is not there" for name in sorted(floors.keys() - built)]
    return violations + [
        f"{package.name}/{source.relative_to(package)}: a sub-room of a room without floors"
        for source in sorted({source.parent for source in sources(package)} - {package})
        if len(parts := inside(".".join((package.name, *source.relative_to(package).parts)))) > 1
        and parts[0] in house.floors
        and "/".join(parts[:-1]) not in house.inside
    ]


def crowded(package: Path) -> list[str]:
    """Folders with more than 14 files, and three files of one folder that begin with the same word."""
    violations: list[str] = []
    for folder in sorted({path.parent for path in sources(package)}):
        names = sorted({path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"})
        place = f"{package.name}/{folder.relative_to(package)}"
        if len(names) > MOST_FILES:
            violations.append(f"{place}: {len(names)} files; a folder has {MOST_FILES} at most")
        first = Counter(name.split("_")[0] for name in names)
        violations += [f"{place}: {count} files begin with {word!r}" for word, count in first.items() if count > 2]
    return violations


def same_names(package: Path) -> list[str]:
    """Public classes of one name in two files."""
    places: dict[str, list[str]] = {}
    for path, code in codes(package):
        for name, _ in code.classes:
            places.setdefault(name, []).append(str(path.relative_to(package)))
    return [f"class {name} is in {' and '.join(files)}" for name, files in places.items() if len(files) > 1]


def refused_words(glossary: str) -> frozenset[str]:
    """The words in code type of the glossary's left column."""
    rows = re.findall(r"^\| ([^|]+) \|[^|]+\|[^|]*\|$", glossary, flags=re.MULTILINE)
    return frozenset(word for cell in rows for word in re.findall(r"`(\w+)`", cell))


def dialect(package: Path, refused: frozenset[str]) -> list[str]:
    """Identifiers that hold a word for which the glossary has another one."""
    return sorted(
        f"{package.name}/{path.relative_to(package)}:{line}: {name}: the glossary refuses {word!r}"
        for path, code in codes(package)
        for name, lines in code.names.items()
        for word in refused & {*map(str.lower, re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)), name.lower().strip("_")}
        for line in lines
    )


def concepts(package: Path) -> tuple[int, int]:
    """How many public classes a package has, and how many of these are Protocols."""
    classes = [found for _, code in codes(package) for found in code.classes]
    return len(classes), sum(protocol for _, protocol in classes)


def unlisted(package: Path, house: House) -> list[str]:
    """Imports between rooms that the table does not list."""
    return [
        f"{found.place}: the table does not say that {found.room} imports {target}"
        for found in imports(package)
        for target in sorted((found.rooms & house.floors.keys()) - {found.room})
        if found.room in house.floors and target not in house.imports.get(found.room, frozenset())
    ]


def deferred(package: Path, house: House) -> list[str]:
    """Imports inside functions, outside the roof and the files that stand directly in a package, which are its door."""
    return [
        f"{found.place}: imports {found.names[0]} inside a function"
        for found in imports(package)
        if found.deferred and found.room and found.room not in house.roof
    ]


def undrawn(packages: Sequence[Path], house: House) -> list[str]:
    """Rooms of the packages that are not in the drawing, and rooms of the drawing that are not there."""
    built = {room for package in packages for room in rooms_of(package)}
    return [f"{room}: built but not drawn" for room in sorted(built - house.floors.keys())] + [
        f"{room}: drawn but not built" for room in sorted(house.floors.keys() - built)
    ]


def nameless(package: Path) -> list[str]:
    """Rooms and files whose name says nothing (``utils``, ``text_helpers.py``)."""
    return [
        f"{package.name}/{path.relative_to(package)}: a name that says nothing about what is inside"
        for path in sorted({*sources(package), *(source.parent for source in sources(package))} - {package})
        if NAMES_OF_NOTHING & set(re.split(r"_+", path.stem))
    ]


def busy_doors(package: Path) -> list[str]:
    """``__init__.py`` files that import something, so that a light module of the room is not light any more."""
    return [
        f"{found.place}: an __init__.py imports nothing"
        for found in imports(package)
        # A package's own door may: that of `stretto` names what it offers, and loads it when it is asked for.
        if found.path.name == "__init__.py" and len(found.path.parts) > 1
    ]


def of_linux(package: Path) -> list[str]:
    """What only Linux has, or which system it is, asked for elsewhere than in the module of the ability."""
    every = {name for names in OF_LINUX.values() for name in names.split()}
    return [
        f"{package.name}/{path.relative_to(package)}:{min(code.names[name])}: {name} is for the modules of Linux"
        for path, code in codes(package)
        for place in ["/".join(inside(".".join((package.name, *path.relative_to(package).with_suffix("").parts))))]
        for name in sorted((every & code.names.keys()) - set(OF_LINUX.get(place, "").split()))
    ]


def heavy_core(package: Path) -> list[str]:
    """What core imports beyond the standard library, msgspec, numpy and xxhash."""
    return [
        f"{found.place}: core imports {found.third_party}"
        for found in imports(package)
        if found.room == "core" and found.third_party and found.third_party not in CORE_MAY_IMPORT
    ]


def undeclared(package: Path, dependencies: list[str]) -> list[str]:
    """Imports of other packages, ours or third parties', that are no dependency in pyproject.toml."""
    declared = {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for line in dependencies}
    declared |= {name for name, by in ((PACKAGE, "stretto_core"), ("google", "protobuf")) if by in declared}
    return [
        f"{found.place}: imports {found.third_party}, which is no dependency of {package.name}"
        for found in imports(package)
        if found.third_party
        and found.third_party.lower() not in declared
        # The door of `import stretto` names what they offer, and says so where one is not installed.
        and (found.room or found.third_party not in ON_DEMAND)
    ]


def too_long(folder: Path) -> list[str]:
    """Files longer than 480 lines, functions longer than 60 (without their docstring)."""
    violations: list[str] = []
    for path in sources(folder):
        place, text = f"{folder.name}/{path.relative_to(folder)}", path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > LONGEST_FILE:
            violations.append(f"{place}: {lines} lines; a file holds one thing, in {LONGEST_FILE} lines at most")
        violations += [
            f"{place}:{one.lineno}: {one.name} has {length} lines; a function has {LONGEST_FUNCTION} at most"
            for one in _functions_in(ast.parse(text).body)
            if (length := _length(one)) > LONGEST_FUNCTION
        ]
    return violations


def _functions_in(statements: Sequence[ast.AST]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions among statements and in their blocks, as deep as they are; no expression has any."""
    for one in statements:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            yield one
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(inner := getattr(one, block, None), list):
                yield from _functions_in(inner)


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def by_wall_clock(package: Path) -> list[str]:
    """Uses of a clock that may jump, outside of the files that only write the date down."""
    return [
        f"{path.relative_to(package)}:{line}: {used} may jump; waits are by time.monotonic"
        for path, code in codes(package)
        if "/".join(inside(".".join((package.name, *path.relative_to(package).parts[:-1], path.stem))))
        not in WRITES_DATES
        for line, used in code.clocks
    ]


def heavy(packages: Sequence[Path], house: House) -> list[str]:
    """Rooms that must stay light and load torch or transformers all the same, found by importing all their modules."""
    folders = {room: path for package in packages for room, path in rooms_of(package).items()}
    light = sorted(house.light & folders.keys())
    if not {*HEAVY} & {*loaded_modules(packages[0], *(folders[room] for room in light))}:
        return []
    return [
        f"{room}: importing it loads {module}"
        for room in light
        for module in loaded_modules(packages[0], folders[room])
        if module in HEAVY
    ]


def loaded_modules(package: Path, *rooms: Path) -> list[str]:
    """The top-level modules that a fresh interpreter holds after importing every module of these rooms."""
    names = [
        ".".join(path.relative_to(next(one for one in path.parents if not (one / "__init__.py").is_file())).parts)
        .removesuffix(".py")
        .removesuffix(".__init__")
        for room in rooms
        for path in sources(room)
    ]
    return sorted({name.split(".")[0] for name in loaded_by(package, *names)})


def loaded_by(package: Path, *names: str) -> list[str]:
    """The modules that a fresh interpreter holds after importing these."""
    program = "import importlib, json, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in names)
    program += "print(json.dumps(sorted(sys.modules)))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=package.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{names} cannot be imported:\n{done.stderr}")
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
