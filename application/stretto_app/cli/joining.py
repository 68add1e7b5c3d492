"""``stretto engine`` and ``stretto rank``: this machine joins a run on another machine."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from stretto.doors.loading import check_packages
from stretto_app.cli.interrupts import importing

JoinAddress = Annotated[
    str,
    typer.Option(
        "--join",
        metavar="ADDRESS|RUN_DIR",
        help="Where the run listens (host:port), or its folder, if this machine sees it.",
    ),
]
JoinToken = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form on every supported Python
    typer.Option("--token", envvar="STRETTO_TOKEN", help="Token of the run; it is in join.json of the run folder."),
]
JoinCount = Annotated[
    int, typer.Option("--count", min=1, max=64, help="Engines, or ranks, on this machine, which share its GPUs evenly.")
]
JoinHost = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form on every supported Python
    typer.Option(
        "--host", help="Address by which the run reaches this machine [default: that of its connection to the run]."
    ),
]
JoinTls = Annotated[
    Optional[str],  # noqa: UP045 - typer reads this form on every supported Python
    typer.Option(
        "--tls", metavar="FOLDER", help="Folder with ca.pem, cert.pem and key.pem, if the run has cluster.tls."
    ),
]
JoinPatience = Annotated[
    float,
    typer.Option(
        "--patience", min=0, max=1e9, help="Seconds to look for the run: at the start, and again after a loss."
    ),
]


def _join(
    kind: str, join: str, token: str | None, count: int, host: str | None, tls: str | None, patience: float
) -> None:
    check_packages(f"stretto {kind}", "stretto_cluster")
    with importing():
        from stretto_app.forking.imports import imports_of_roles

        with imports_of_roles():  # libraries start no threads, with which no process is forked
            from stretto_app.extensions.commands.join import ROLES, offer, work
        from stretto_app.forking.role import fork_server

    brought = offer(join, token, count=count, host=host, tls=tls, patience=patience, kind=kind)
    with fork_server(roles=(ROLES[kind],), beside=True) as spawner:
        work(brought, lambda text: print(text, flush=True), spawner)


def engine(
    join: JoinAddress,
    token: JoinToken = None,
    count: JoinCount = 1,
    host: JoinHost = None,
    tls: JoinTls = None,
    patience: JoinPatience = 600.0,
) -> None:
    """Join a run on another machine and generate for it until it ends.

    Ctrl-C or SIGTERM leaves: other engines go on with the completions of this machine. A second signal changes nothing.
    """
    _join("engine", join, token, count, host, tls, patience)


def rank(
    join: JoinAddress,
    token: JoinToken = None,
    count: JoinCount = 1,
    host: JoinHost = None,
    tls: JoinTls = None,
    patience: JoinPatience = 600.0,
) -> None:
    """Join a run on another machine as ranks of its trainer (trainer.remote_ranks), until it ends.

    Orders are authenticated; torch's own connections between ranks are neither authenticated nor encrypted.
    """
    _join("rank", join, token, count, host, tls, patience)
