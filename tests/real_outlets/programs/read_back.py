"""What a tool has of the run in the current folder, read with its own package: ``python read_back.py TOOL``.

Prints a JSON object: `points`, each with the step and one name and number; `tables`, the completions of each table;
`alarms`, each with its title and its text; `numbers`, W&B's own of its points, file after file; the recipe and the
tags, as far as they are there.
"""

import json
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Found = dict[str, Any]


_HEADER, _BLOCK, _PART = 7, 32_768, struct.Struct("<IHB")  # of W&B's files: a log of LevelDB's form
_LAST_PARTS = (1, 4)  # of a record: it is whole, or this is its end


def _records(path: Path) -> Iterator[bytes]:
    data, at, record = path.read_bytes(), _HEADER, b""
    while at + _PART.size <= len(data):
        if _BLOCK - at % _BLOCK < _PART.size:  # too little room for a part
            at += _BLOCK - at % _BLOCK
            continue
        _, size, kind = _PART.unpack_from(data, at)
        at += _PART.size
        record, at = record + data[at : at + size], at + size
        if kind in _LAST_PARTS:
            yield record
            record = b""


def wandb() -> Found:
    from wandb.proto.wandb_internal_pb2 import Record

    found: Found = {"points": [], "tables": [], "alarms": [], "config": {}, "tags": [], "runs": [], "numbers": []}
    for path in sorted(Path("run/wandb").glob("offline-run-*/*.wandb")):
        for data in _records(path):
            record = Record.FromString(data)
            if record.HasField("run"):
                found["runs"].append(record.run.run_id)
                found["tags"] = list(record.run.tags)
                found["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("alert"):
                found["alarms"].append([record.alert.title, record.alert.text])
            items = record.history.item
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            found["numbers"] += [record.history.step.num] if record.HasField("history") else []
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            found["points"] += [[values["step"], name, value] for name, value in numbers.items()]
        for table in sorted(path.parent.glob("files/media/table/*.json")):
            found["tables"].append([row[2] for row in json.loads(table.read_text())["data"]])
    found["runs"] = sorted(set(found["runs"]))
    return found


def mlflow() -> Found:
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    points = [
        [point.step, name, point.value]
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    ]
    tables = []
    for file in sorted(Path(client.download_artifacts(run.info.run_id, "samples")).iterdir()):
        table = json.loads(file.read_text())
        tables.append([row[table["columns"].index("completion")] for row in table["data"]])
    tags = {tag: value for tag, value in run.data.tags.items() if not tag.startswith("mlflow.")}
    alarms = [[tag.removeprefix("alarm/"), tags.pop(tag)] for tag in [*tags] if tag.startswith("alarm/")]
    config, runs = run.data.params, [run.info.run_id]
    return {"points": points, "tables": tables, "alarms": alarms, "config": config, "tags": [*tags], "runs": runs}


def trackio() -> Found:
    with sqlite3.connect("trackio/project.db") as database:
        lines = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        alarms = database.execute("SELECT title, text FROM alerts").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    found: Found = {
        "points": [],
        "tables": [],
        "alarms": alarms,
        "config": json.loads(config),
        "runs": sorted({line[0] for line in lines}),
    }
    for _, step, metrics in lines:
        for name, value in json.loads(metrics).items():
            if isinstance(value, dict):
                found["tables"].append([row["completion"] for row in value["_value"]])
            else:
                found["points"].append([step, name, value])
    return found | {"tags": found["config"]["tags"].split(", ")}


READERS: dict[str, Callable[[], Found]] = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}


if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](), default=str))
