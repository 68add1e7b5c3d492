"""Promises: `stretto watch` prints one line with its address, serves the runs of the folders given, and ends at a
signal; a folder that is not there and a port in use are mistakes of the user; `inspect` has the alarms.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec

from tests.watch.runs import step_line, write_run

COMMAND = [sys.executable, "-m", "stretto.cli.main"]


def test_the_command_prints_its_address_serves_and_ends_at_a_signal(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "first")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [*COMMAND, "watch", str(tmp_path / "runs"), "--port", str(port), "--token", "T", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == f"stretto watch: http://127.0.0.1:{port}/?token=T\n"
            found = httpx.get(f"http://127.0.0.1:{port}/api/runs", headers={"authorization": "Bearer T"}, timeout=30)
            assert [run["name"] for run in found.json()["runs"]] == ["first"]
            again = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert (again.returncode, str(port) in again.stderr) == (2, True)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stdout.read() == ""


def test_a_folder_that_is_not_there_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "watch", str(tmp_path / "nowhere")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "nowhere: does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_inspect_has_the_alarms(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    lines = [step_line(step, entropy=1.0 if step <= 10 else 0.01) for step in range(1, 31)]
    (path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    done = subprocess.run([*COMMAND, "inspect", "--json", str(path)], capture_output=True, text=True, timeout=60)
    (alarm,) = json.loads(done.stdout)["alarms"]
    # a window of ten with k steps of 0.01 has mean 1 - 0.099 k: below 0.2 from k = 9 on
    assert (alarm["name"], alarm["first_step"], alarm["look"]) == ("entropy_collapse", 19, "series:trainer.entropy")
    shown = subprocess.run([*COMMAND, "inspect", str(path)], capture_output=True, text=True, timeout=60).stdout
    assert "alarm  entropy collapse since step 19: the entropy fell from 1 to 0.01 nats" in shown
