"""Promises about the pages that are shipped, without a browser.

- The committed build is the one of the committed sources, and its page names files that are there.
- It is less than 200 kB, has nothing inline, names nothing of another host, has the licences of what is bundled.
- The types of its sources have the fields of the records that it shows, and allow what these may hold.
- The sentences below the curves are those of docs/reference/metrics.md, of every family of series.
"""

import hashlib
import json
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest

from stretto.store.totals import Membership
from stretto_report.audit.evidence import Alarm
from stretto_report.watch.index.steps import _MAPS, _NUMBERS, DERIVED
from stretto_report.watch.index.timeline import Tiles
from stretto_report.watch.runs.catalog import BranchLine
from stretto_report.watch.runs.comparing import OneToken
from stretto_report.watch.runs.health import Health, PromptCount
from stretto_report.watch.runs.questions import Repeats
from stretto_report.watch.runs.run import RunSummary
from stretto_report.watch.runs.table import Page, TableRow
from stretto_report.watch.runs.training import TrainingSums
from stretto_report.watch.runs.trajectory import LifeEvent, ShownGroup, ShownSegment, TokenColumns
from stretto_report.watch.web.replay import ReplayState

ROOT = Path(__file__).parent.parent.parent
WEB = ROOT / "web"
STATIC = ROOT / "packages" / "report" / "stretto_report" / "watch" / "static"
SOURCES = ("index.html", "package-lock.json", "package.json", "public", "src", "tsconfig.json", "vite.config.js")
BUNDLED = ("@tanstack/preact-table", "@tanstack/table-core", "preact", "uplot")


def sources() -> dict[str, bytes]:
    roots = [WEB / name for name in SOURCES]
    files = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*")) if path.is_file()]
    return {str(path.relative_to(WEB)): path.read_bytes() for path in files}


def digest(files: dict[str, bytes]) -> str:
    """As web/vite.config.js computes it."""
    whole = hashlib.sha256()
    for name in sorted(files):
        whole.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return whole.hexdigest()


def test_the_committed_build_belongs_to_the_committed_sources() -> None:
    built = (STATIC / "sources.sha256").read_text(encoding="utf-8").strip()
    assert built == digest(sources()), "the pages are older than their sources: make web"
    assert built != digest(sources() | {"src/main.tsx": b""})


def test_the_page_names_files_that_are_there_and_has_nothing_inline() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    named = re.findall(r'(?:src|href)="/([^"]+)"', page)
    assert len(named) == 3
    assert all((STATIC / name).is_file() for name in named)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", page) == [""]
    assert "<style" not in page
    assert "style=" not in page


def test_the_build_loads_nothing_from_elsewhere() -> None:
    for style in STATIC.rglob("*.css"):
        assert not re.findall(r"url\(|@import", style.read_text(encoding="utf-8")), style
    for script in STATIC.rglob("*.js"):
        assert not re.findall(r"""(?:fetch|import|EventSource)\(["'`]https?:""", script.read_text(encoding="utf-8")), (
            script
        )


def test_the_pages_are_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) < 210_000


def test_the_licences_of_what_is_bundled_are_beside_it() -> None:
    licences = (STATIC / "licences.txt").read_text(encoding="utf-8")
    for name in {*BUNDLED, *json.loads((WEB / "package.json").read_text(encoding="utf-8"))["dependencies"]}:
        assert re.search(rf"^{re.escape(name)} [\d.]+ \(MIT\)$", licences, flags=re.MULTILINE), name


def luminance(colour: str) -> float:
    """Of WCAG 2.2, relative."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_lines_are_seen_on_the_light_and_on_the_dark_ground() -> None:
    """Success criterion 1.4.11 of WCAG 2.2: at least 3 to 1."""
    assert contrast("#000000", "#ffffff") == 21
    palette = (WEB / "src" / "data" / "palette.ts").read_text(encoding="utf-8")
    style = (WEB / "src" / "style.css").read_text(encoding="utf-8")
    (kinds,) = re.findall(r"KINDS = \[(.*?)\]", palette)
    grounds = re.findall(r"--ground: light-dark\((#\w+), (#\w+)\)", style)[0]
    colours = re.findall(r"#\w{6}", kinds)
    assert len({*colours}) == 8
    low = [(colour, ground) for colour in colours for ground in grounds if contrast(colour, ground) < 3]
    assert low == []


def test_the_lock_file_names_no_host() -> None:
    assert not re.findall(r"https?://registry", (WEB / "package-lock.json").read_text(encoding="utf-8"))


def test_every_curve_says_whether_it_is_good() -> None:
    sources = "".join((WEB / "src" / "data" / f"{name}.ts").read_text("utf-8") for name in ("curves", "further"))
    told = set(re.findall(r"^  '?([\w.]+)'?: ['`\"][^'`\"]+", sources, re.MULTILINE))
    page = json.loads((WEB / "src" / "data" / "sentences.json").read_text(encoding="utf-8"))
    curves = {*_NUMBERS, *DERIVED, *_MAPS, *(name for name in page if name.startswith("trainer."))}
    assert curves - told == set()


def test_the_sentences_below_the_curves_are_those_of_the_page_of_metrics() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    sentences = json.loads((WEB / "src" / "data" / "sentences.json").read_text(encoding="utf-8"))
    families = {"queues", "busy", "memory", "rewards", "canary"}
    assert sentences.keys() >= families | {"reward", "staleness_mean", "trainer.loss", "trainer.behavior_logprob_error"}
    assert [name for name, one in sentences.items() if f"{one['sentence']} | {one['unit']}".rstrip() not in page] == []


#: The record that the server sends for a type of web/src/data/api.ts.
RECORDS: dict[str, type[msgspec.Struct]] = {
    "Alarm": Alarm, "AskedPrompt": PromptCount, "Branch": BranchLine, "DiffToken": OneToken, "EngineLine": Membership,
    "Group": ShownGroup, "Health": Health, "LifeEvent": LifeEvent, "Repeats": Repeats, "Replay": ReplayState,
    "RunLine": RunSummary, "Segment": ShownSegment, "Tiles": Tiles, "TokenColumns": TokenColumns,
    "TrainingSums": TrainingSums, "TrajectoryLine": TableRow, "TrajectoryPage": Page,
}  # fmt: skip
ALIASES = {"Column": "list", "States": "object"}


def kinds_in_the_browser(told: str) -> set[str]:
    """What a value of this type is in JSON: string, number, boolean, null, list, object."""
    found = set()
    for part in re.split(r" \| (?![^{(\[]*[})\]])", told.partition(" //")[0]):
        quoted, is_list = part.startswith("'"), part.endswith("]")
        plain = part in ("string", "number", "boolean", "null")
        found.add("string" if quoted else "list" if is_list else part if plain else ALIASES.get(part, "object"))
    return found


def kinds_in_a_record(annotation: Any) -> set[str]:
    """The same, of a field of a record."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return {kind for one in get_args(annotation) for kind in kinds_in_a_record(one)}
    if origin is Literal:
        return {"string"}
    kind = origin or annotation
    if kind in (Any, msgspec.Raw):  # another reader says what it holds
        return set()
    if kind is type(None):
        return {"null"}
    if issubclass(kind, Mapping | msgspec.Struct):
        return {"object"}
    return {{str: "string", bool: "boolean", int: "number", float: "number"}.get(kind, "list")}


@pytest.mark.parametrize("name", RECORDS)
def test_the_pages_know_what_a_field_of_a_record_may_hold(name: str) -> None:
    source = (WEB / "src" / "data" / "api.ts").read_text(encoding="utf-8")
    [body] = re.findall(rf"^export interface {name} {{\n(.*?)^}}", source, re.MULTILINE | re.DOTALL)
    told = {field: kinds_in_the_browser(kind) for field, kind in re.findall(r"^  (\w+): (.*)$", body, re.MULTILINE)}
    record, hints = RECORDS[name], get_type_hints(RECORDS[name])
    names = zip(record.__struct_encode_fields__, record.__struct_fields__, strict=True)
    sent = {encoded: kinds_in_a_record(hints[field]) for encoded, field in names}
    assert told.keys() == sent.keys()
    assert {field: kinds - told[field] for field, kinds in sent.items() if kinds - told[field]} == {}
