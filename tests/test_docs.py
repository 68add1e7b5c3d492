"""Promises about the documents: what they name is there, and what is there is named.

- every place in the code (`file.py:name`, a path of the repository) exists, and so does every page that is linked;
- every number that a run writes has its line in docs/reference/metrics.md;
- docs/reference/recipe.md is what the configurations say, and every key has its sentence;
- docs/explanation/faults.md lists the laws of the checker, and counts its own rows;
- the tables of the pages on staleness, faults and results, and of the README, are those of the committed results;
- the site has every page in its navigation, in one of four parts, and loads nothing from elsewhere;
- every package has a page, which its README and the first page link;
- all its pages together have at most 50,000 words beside code and numbers."""

import ast
import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import report
from benchmarks.cluster import summary as machines_killed_and_cut_off
from benchmarks.faults import summary as kills_summary
from benchmarks.in_flight import summary as in_flight
from benchmarks.links import summary as runs_over_links
from benchmarks.picture import Drawn
from benchmarks.soak import summary as soak_summary
from benchmarks.staleness import summary
from benchmarks.summary import in_parts, learnt, measured, missed, page, pretrained, readme
from benchmarks.tally import read
from stretto.store.inspection import Inspection
from stretto.store.series.metrics import EvaluationLine, StepMetrics
from stretto.trainer.metrics import _NAMES as MEASURED
from stretto_report.audit.laws import LAWS
from tests.launch.reference import recipe_table

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SITE_PAGES = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "log.md"]
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")

PARTS = {"tutorials", "how_to", "reference", "explanation"}
MOST_WORDS = 50_000


def text_of(page: str) -> str:
    """A page of docs/, or the README."""
    return (ROOT / page if page == "README.md" else ROOT / "docs" / page).read_text(encoding="utf-8")


def result(name: str) -> Any:
    """What a committed file says."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]


def words(text: str) -> str:
    """The text, wherever its lines end."""
    return " ".join(text.split())


_PLACE = re.compile(r"`([\w./-]+\.(?:py|toml|json|md))(?::([\w.]+))?`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_the_page_of_the_keys_is_what_the_configurations_say() -> None:
    page = text_of("reference/recipe.md")
    assert page == recipe_table(), "python -m tests.launch.reference > docs/reference/recipe.md"
    assert [line for line in page.splitlines() if line.endswith("|  |") and not line.startswith("| `kind` ")] == []


@cache
def names_in(path: Path) -> frozenset[str]:
    """Functions, classes, methods as ``Class.method``, and module constants of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.ClassDef(name=name, body=body):
                methods = (inner for inner in body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef))
                found |= {name, *(f"{name}.{inner.name}" for inner in methods)}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return frozenset(found)


#: Where the places of a page begin.
BASES = (
    *sorted((ROOT / "packages").glob("*/stretto*")),
    *sorted((ROOT / "packages").iterdir()),
    ROOT / "application",
    ROOT / "application" / "stretto_app",
    ROOT,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_place_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for file, name in _PLACE.findall(page.read_text(encoding="utf-8")):
        if "/" not in file:
            continue  # a file of the run folder, or of a model
        path = next((base / file for base in BASES if (base / file).is_file()), None)
        if path is None or (name and name not in names_in(path)):
            missing.append(f"{file}:{name}")
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def fields(record: type[msgspec.Struct]) -> list[str]:
    """The fields of a record; those of records inside it as ``outer.inner``."""
    found: list[str] = []
    for field in msgspec.structs.fields(record):
        inside = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        found += [f"{field.name}.{name}" for name in fields(field.type)] if inside else [field.name]
    return found


@pytest.mark.parametrize("record", [StepMetrics, EvaluationLine, Inspection], ids=lambda record: record.__name__)
def test_every_field_of_a_record_has_its_line(record: type[msgspec.Struct]) -> None:
    assert [name for name in fields(record) if f"| `{name}` |" not in text_of("reference/metrics.md")] == []


def test_every_measurement_of_an_update_has_its_line() -> None:
    keys = {*MEASURED.values(), *written_keys("trainer/metrics.py"), *written_keys("trainer/trainer.py")}
    assert {"loss", "tokens"} <= keys
    assert [key for key in sorted(keys) if f"| `{key}` |" not in text_of("reference/metrics.md")] == []


def written_keys(file: str) -> set[str]:
    """The keys of ``measured[...] = ``, of ``measured = {...}`` and of ``facts = {...}`` in a file."""
    keys: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / "packages" / "core" / "stretto" / file).read_text(encoding="utf-8"))):
        match node:
            case ast.Subscript(value=ast.Name(id="measured"), slice=ast.Constant(value=str(key))):
                keys.add(key)
            case (
                ast.AnnAssign(target=ast.Name(id="measured"), value=ast.Dict(keys=inside))
                | ast.Assign(targets=[ast.Name(id="facts")], value=ast.Dict(keys=inside))
            ):
                keys |= {str(key.value) for key in inside if isinstance(key, ast.Constant)}
    return keys


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("staleness", lambda: [summary(result("staleness")["rows"], group_size=size, sigma=1.2) for size in (1, 8)]),
        ("staleness", lambda: [in_flight(result("in-flight")["rows"])]),
        ("faults", lambda: [kills_summary(result("faults"))]),
        ("faults", lambda: [soak_summary(read(ROOT / "benchmarks" / "results" / "soak.json", "soak")), *in_parts()]),
        ("faults", lambda: map(machines_killed_and_cut_off, result("cluster").values())),
        ("faults", lambda: [runs_over_links(result("links"))]),
    ],
    ids=["staleness", "groups in flight", "random kills", "soak and campaigns in parts", "machines", "links"],
)
def test_a_table_of_a_page_is_the_committed_result(page: str, told: Callable[[], Iterable[str]]) -> None:
    text = words(text_of(f"explanation/{page}.md"))
    assert [one for one in told() if words(one) not in text] == []


def test_the_laws_on_the_page_are_those_of_the_checker() -> None:
    section = text_of("explanation/faults.md").partition("## The laws\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| (.+?) \|", section, flags=re.MULTILINE)
    assert names == ["law", *(law.__name__.replace("_", " ") for law in LAWS)]


def test_the_table_of_faults_is_counted_as_it_is() -> None:
    page = text_of("explanation/faults.md")
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| (.*) \|$", page, flags=re.MULTILINE)
    without = [number for number, shown in rows if "`tests/" not in shown]
    part = [number for number, shown in rows if shown.startswith("part")]
    full = len(rows) - len(part) - len(without)
    told = f"of these {len(rows)} faults: {full} rows are shown in full, {len(part)} in part ({', '.join(part)}), and "
    told += f"{len(without)} have a reason instead of a test ({', '.join(without)})" if without else "each has a test"
    assert told in words(page)


def test_the_results_in_the_readme_are_the_committed_ones() -> None:
    page = words(text_of("README.md"))
    assert [line for line in (learnt(), *readme()) if words(line) not in page] == []


@pytest.mark.parametrize("model", ["3.4M", "48M"])
def test_the_readme_has_generation_beside_vllm_in_both_types_of_every_model_that_was_measured(model: str) -> None:
    files = (ROOT / "benchmarks" / "results").glob("generation-rates-*.json")
    assert {re.findall(r"rates-([\d.]+M)", path.name)[0] for path in files} == {"3.4M", "48M"}
    rows = [line for line in text_of("README.md").splitlines() if "| vLLM: " in line]
    for dtype in ("float32", "bfloat16"):
        assert [line for line in rows if line.startswith(f"| tokens/s, {model} in {dtype}, ")]


def test_what_is_said_of_the_pretrained_model_is_its_committed_result() -> None:
    assert pretrained() in words(text_of("tutorials/own_model.md"))


def test_the_page_of_results_is_what_the_committed_files_say() -> None:
    assert text_of("reference/results.md") == page(), "python -m benchmarks.summary > docs/reference/results.md"


def test_a_result_of_another_processor_has_its_own_heading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = ROOT / "benchmarks" / "results"
    for file in committed.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    other = json.loads((committed / "goodput.json").read_text())
    other["machine"]["processor"], other["results"]["period"] = "Another", 3.0
    (tmp_path / "goodput.another.json").write_text(json.dumps(other))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    _, _, there = page().partition("\n## Another, 2 cores")
    assert "a kill every 3 s" in there.partition("\n## ")[0]


@pytest.mark.parametrize(("ratio", "told"), [(7.9, 1), (8.0, 0)])
def test_only_a_goal_that_was_not_reached_is_among_the_missed(
    monkeypatch: pytest.MonkeyPatch, ratio: float, told: int
) -> None:
    found = {"loop-trl": {"here": {"ratio_to_best": ratio}}}
    monkeypatch.setattr("benchmarks.summary.measured", lambda name: found.get(name) or measured(name))
    assert sum(line.startswith("| 8 times trl") for line in missed()) == told


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    _, _, navigation = SITE.partition("\nnav:\n")
    pages = [str(page.relative_to(ROOT / "docs")) for page in SITE_PAGES]
    assert sorted(re.findall(r"(\S+\.md)$", navigation, flags=re.MULTILINE)) == sorted(pages)
    assert "\nexclude_docs: |\n  /log.md\n" in SITE


def test_every_page_is_in_one_of_the_four_parts() -> None:
    assert {page.relative_to(ROOT / "docs").parts[0] for page in SITE_PAGES} == PARTS | {"index.md"}


@pytest.mark.parametrize("package", sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir()))
def test_every_package_has_its_page_which_its_readme_links(package: str) -> None:
    page = "explanation/flow.md" if package in ("core", "kernels") else f"how_to/{package}.md"
    assert f"](../../docs/{page})" in (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8")
    assert f"]({page})" in text_of("index.md")


def prose(text: str) -> list[str]:
    """The words of a page: of code, addresses of links, comments and numbers none is one."""
    for beside in (r"^ *```.*?^ *```", r"<!--.*?-->", r"`[^`\n]*`", r"(?<=\])\([^)]*\)"):
        text = re.sub(beside, "", text, flags=re.MULTILINE | re.DOTALL)
    return [word for word in text.split() if re.search(r"[^\W\d_]", word)]


def test_what_is_no_word_is_not_counted() -> None:
    page = (
        "# Two words\n\n`a key` 17 [link](a/page.md)\n\n```bash\nstretto train\n```\n<!-- needs time -->\n| one | 2.5 |"
    )
    assert prose(page) == ["Two", "words", "[link]", "one"]


def test_the_site_is_said_in_few_words() -> None:
    assert sum(len(prose(page.read_text(encoding="utf-8"))) for page in SITE_PAGES) <= MOST_WORDS


def test_the_site_loads_no_fonts_from_elsewhere() -> None:
    assert "\n  font: false\n" in SITE


def test_the_python_page_names_modules_that_exist() -> None:
    modules = re.findall(r"^::: ([\w.]+)$", text_of("reference/docstrings.md"), flags=re.MULTILINE)
    assert "stretto" in modules
    folders = {path.name: path.parent for path in (ROOT / "packages").glob("*/stretto*")}
    places = [folders[module.partition(".")[0]] / module.replace(".", "/") for module in modules]
    assert not [one for one in places if not (one / "__init__.py").is_file() and not one.with_suffix(".py").is_file()]


def test_the_picture_of_a_run_names_its_machine() -> None:
    images = ROOT / "docs" / "images"
    drawn = msgspec.json.decode((images / "run.json").read_bytes(), type=Drawn)
    assert f"{drawn.machine.processor}, {drawn.machine.cores} cores" in text_of("README.md")
    assert (images / "run.png").read_bytes().startswith(b"\x89PNG")
