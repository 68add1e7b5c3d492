"""Readers of dataset rows: JSONL and CSV files are read here, everything else, the Hugging Face hub included, by
`datasets`, an optional package.

rows.jsonl rows.jsonl.gz rows.csv rows.tsv       lines of a file, each with its number
rows.parquet rows.arrow                          by `datasets`, a batch at a time
folder/                                          as `save_to_disk` writes it, or a folder of such files
owner/name                                       a dataset of the hub

Without a network, the hub's library retries for half a minute. So the address is tried first, with a deadline. If
nothing answers, the library is set to use its cache only.
"""

from __future__ import annotations

import csv
import importlib
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from stretto.core.errors import DataError, Problem
from stretto.launch.preflight.paths import nearest_file
from stretto.processes.http.reach import unreachable
from stretto.rollout.tasks import FILES, RowsSource, kind_of
from stretto_workflows.data.jsonl import lines_of, mistake, object_of, read_text


def package(name: str, extra: str, place: str) -> Any:
    """Import the module `name`, which comes with ``stretto[extra]``, and return it. `place`: for errors.

    Raises:
        DataError: the package is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        found = f"needs the package {name!r}, which cannot be imported ({error})"
        raise DataError([Problem(place, found, f"pip install 'stretto[{extra}]'")]) from None


@contextmanager
def reachable_or_cached(place: str) -> Iterator[str]:
    """Context manager: try to reach the hub, and if it does not reply, set the Hugging Face libraries to use only their
    cache within the block. Yields why the hub cannot be used (``HF_HUB_OFFLINE`` included), or "" if it replies.
    `place`: for errors.

    Raises:
        DataError: the libraries are not installed.
    """
    constants, config = package("huggingface_hub.constants", "data", place), package("datasets.config", "data", place)
    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    if not (fault := _fault(constants.ENDPOINT)):
        yield ""
        return
    before = config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield f"the hub at {constants.ENDPOINT} cannot be reached ({fault})"
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = False, before


def _fault(address: str) -> str:
    """Reason why nothing answers at an address, or at the proxy that is set for it; "" if something answers."""
    parts = urlsplit(address)
    passed_by = proxy_bypass(parts.hostname or "")
    proxy = None if passed_by else getproxies().get(parts.scheme)
    return unreachable(proxy or address)


#: Function that parses a row and returns its columns; it raises the DataError of an invalid row.
Row = Callable[[], Mapping[str, Any]]
_LOCAL = f'a file of this machine: data = "rows.jsonl", allowed: {", ".join(FILES)}'
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")


def rows_of(source: RowsSource) -> Iterator[tuple[str, Row]]:
    """Iterate over all rows of a dataset, in its order: pairs of the row's place ("rows.jsonl:7"), for errors, and a
    function that parses the row.

    Raises (here or during the iteration):
        DataError: there is no such dataset, or it cannot be read.
    """
    path, kind = Path(source.data), kind_of(source.data)
    if path.is_dir():
        return _from_folder(source)
    if kind in FILES and not path.exists():
        raise mistake(source.data, "no such file", nearest_file(path))
    if path.is_file():
        match kind:
            case ".jsonl" | ".json":
                return ((where, partial(object_of, line, where)) for _, where, line in lines_of(path))
            case ".csv" | ".tsv":
                return _table(path, "\t" if kind == ".tsv" else ",")
            case ".parquet" | ".arrow":
                return _by_datasets(source, kind[1:], data_files=source.data, split="train", streaming=True)
        raise mistake(source.data, f"a file with the ending {kind or 'none'!r}", f"allowed: {', '.join(FILES)}")
    if not _HUB.fullmatch(source.data):
        raise mistake(source.data, "no such file or folder, and no name of the hub", "e.g. openai/gsm8k")
    return _from_hub(source)


def _table(path: Path, comma: str) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for the rows of a CSV file, with `comma` between its cells; blank lines are skipped. Its first
    line names the columns. Raises DataError for blank or repeated column names, a row of another length, or broken CSV.
    """
    reader = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=comma, strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) < len(names) or not all(map(str.strip, names)):
            raise mistake(f"{path}:1", f"columns {names}", "each column needs a name of its own")
        for values in reader:
            if values:
                where = f"{path}:{reader.line_num}"
                yield where, partial(_record, names, values, where)
    except csv.Error as error:
        raise mistake(f"{path}:{reader.line_num}", f"broken CSV: {error}", "larger fields need JSONL") from None


def _record(names: list[str], values: list[str], place: str) -> Mapping[str, Any]:
    if len(values) != len(names):
        raise mistake(place, f"{len(values)} fields", f"the first line names {len(names)} columns")
    return dict(zip(names, values, strict=True))


def _from_folder(source: RowsSource) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for the rows of a folder: one that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote,
    or else a folder of data files. Raises DataError for an unknown split or files that cannot be read."""
    folder = Path(source.data)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        datasets = package("datasets", "data", source.data)
        saved = _asked(source, lambda: datasets.load_from_disk(source.data))
        if isinstance(saved, dict):
            if source.split not in saved:
                raise mistake(source.data, f"has no split {source.split!r}", f"allowed: {', '.join(sorted(saved))}")
            saved = saved[source.split]
        return _numbered(source, saved)
    return _by_datasets(source, source.data, name=source.subset, split=source.split, streaming=True)


def _by_datasets(source: RowsSource, name_or_format: str, /, **asked: Any) -> Iterator[tuple[str, Row]]:
    datasets = package("datasets", "data", source.data)
    return _numbered(source, _asked(source, lambda: datasets.load_dataset(name_or_format, **asked)))


def _numbered(source: RowsSource, rows: Any) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for `rows` of the library `datasets`, any of whose errors becomes a DataError."""
    found, number = iter(rows), 0
    while True:
        row = _asked(source, lambda: next(found, None), f" after row {number}")
        if row is None:
            return
        number += 1
        yield f"{source.data}: row {number}", partial(dict, row)


def _from_hub(source: RowsSource) -> Iterator[tuple[str, Row]]:
    """Yield (place, row) for the rows of a hub dataset; if the hub cannot be reached, of its copy in the library's
    cache. Raises DataError if neither has it."""
    asked = {"name": source.subset, "split": source.split, "revision": source.revision, "streaming": source.streaming}
    with reachable_or_cached(source.data) as fault:
        try:
            return _by_datasets(source, source.data, **asked)
        except DataError as error:
            if not fault:
                raise
            found = f"{fault}, and its dataset of this name is not in the cache: {error.problems[0].found}"
            raise DataError([Problem(source.data, found, f"with a network: OWNER/NAME of the hub; {_LOCAL}")]) from None


def _asked(source: RowsSource, ask: Callable[[], Any], where: str = "") -> Any:
    """Return the result of `ask`; any error of it becomes a DataError. `where`: addition to its message."""
    try:
        return ask()
    # `datasets` and its readers raise many types; all concern the dataset that the user named.
    except Exception as error:
        words = " ".join(str(error).split())[:300]
        found = f"cannot be read{where}: {type(error).__name__}: {words}"
        remedy = "check the file, or the dataset's name, subset and split, and the network"
        raise DataError([Problem(source.data, found, remedy)]) from None
