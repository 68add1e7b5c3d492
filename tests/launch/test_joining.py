"""Promises: `--join FOLDER` takes address, token and certificates from the run's join.json, and what is given by hand
comes first; `stretto scale` waits for as long as the run says that it may take; a machine for which the run has no file
descriptors is told so.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from stretto.cluster.agent import Offer
from stretto.cluster.join_file import JOIN, JoinFile
from stretto.core.errors import DeadlineExceeded, RecipeError
from stretto.launch.commands.join import offer, scale
from stretto.launch.preflight.descriptors import no_room_for
from stretto.processes.handshake import admit_blocking


def joined(folder: Path, token: str | None = None, tls: str | None = None) -> Offer:
    return offer(str(folder), token, count=1, host=None, tls=tls, patience=1.0)


def write(folder: Path, content: JoinFile) -> None:
    (folder / JOIN).write_bytes(msgspec.json.encode(content))


def test_address_token_and_certificates_are_those_of_the_run_folder(tmp_path: Path) -> None:
    write(tmp_path, JoinFile(run="run", token="t" * 64, address="10.0.0.1:7420", tls="/certificates"))
    found = joined(tmp_path)
    assert (found.address, found.token, found.tls) == ("10.0.0.1:7420", "t" * 64, "/certificates")
    found = joined(tmp_path, token="u" * 64, tls="/mine")
    assert (found.token, found.tls) == ("u" * 64, "/mine")
    write(tmp_path, JoinFile(run="run", token="t" * 64, address="10.0.0.1:7420"))
    assert joined(tmp_path).tls == ""


def test_a_run_that_takes_no_machines_is_named(tmp_path: Path) -> None:
    write(tmp_path, JoinFile(run="run", token="t" * 64, control="unix:/somewhere"))
    with pytest.raises(RecipeError, match="takes no machines"):
        joined(tmp_path)


def test_scale_waits_for_as_long_as_the_run_says(tmp_path: Path) -> None:
    """A listener that never says a word; the handshake has a deadline of its own, of ten seconds."""
    control = tmp_path / "control"
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(str(control))
        endpoint.listen()
        write(tmp_path, JoinFile(run="run", token="t" * 64, control=f"unix:{control}", patience=0.5))
        greeting = threading.Thread(target=_greet, args=(endpoint,))
        greeting.start()
        with pytest.raises(DeadlineExceeded, match=r"stretto scale.*0\.5 s"):
            scale(tmp_path, ["engines=2"])
        greeting.join(20)


def _greet(endpoint: socket.socket) -> None:
    """Admit a caller, and leave it without an answer."""
    connection, _ = endpoint.accept()
    with connection:
        admit_blocking(connection, "t" * 64, b"run", lambda introduction: "", peer="a command", seconds=10)
        connection.settimeout(10)
        with contextlib.suppress(ConnectionError):  # it has cut the connection
            connection.recv(1)


def test_a_machine_for_which_there_are_no_descriptors_is_told_so() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
    try:
        assert no_room_for(1) == ""
        said = no_room_for(512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "512 more engine(s) need 2048" in said
    assert "ulimit -n" in said
