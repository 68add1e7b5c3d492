"""Command line. Imports are deferred until a command runs, so that --help is quick."""

from __future__ import annotations

import codecs
import os
import sys
from io import TextIOWrapper
from json import dumps
from pathlib import Path
from typing import Annotated, Optional

import typer

from stretto import __version__
from stretto.core.errors import StrettoError, described, harmless
from stretto.doors.loading import ALWAYS, check_packages
from stretto_app.cli.group import Commands
from stretto_app.cli.interrupts import forking, importing
from stretto_app.cli.joining import engine, rank
from stretto_app.cli.mistakes import (
    refuse_file,
    refuse_model,
    refuse_preferences,
    refuse_recipe,
    refuse_run,
    refuse_training,
)
from stretto_app.cli.planning import plan
from stretto_app.cli.runs import export, study, watch
from stretto_app.cli.score import score

app = typer.Typer(
    name="stretto",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done; 1 failed, a law is broken, or runs differ; 2 a mistake of the user; 128+n stopped by "
    "signal n. Built models and warm starts are cached in the folder STRETTO_CACHE [default: ~/.cache/stretto].",
)
app.add_typer(score)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"stretto {__version__}")
        raise typer.Exit


@app.callback()
def door(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fully asynchronous reinforcement learning for language models: generation never waits for training."""


RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="A recipe.")]
RecipeOrRun = Annotated[
    Path,
    typer.Argument(metavar="RECIPE.toml|RUN_DIR", help="A recipe; with --resume, also a run folder."),
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this form on every supported Python
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Replace values of the recipe: trainer.steps=100."),
]
EngineOverrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - as above
    typer.Argument(
        metavar="[engine.KEY=VALUE]...",
        help="Settings of the engine, as in a recipe.",
    ),
]
ServerOverrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - as above
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of [engine] and [deadlines], as in a recipe."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run folder.")]


@app.command()
def train(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run [default: runs/RECIPE-DATE].")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in RUN_DIR, or in --run-dir.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and start nothing.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|ADDRESS|local",
            help="Start the engines on a Ray cluster: the one that runs here, the one at ADDRESS, or a new one on this "
            "machine.",
        ),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw the run into its folder once it has ended.")] = True,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="All measurements below each line of progress; a terminal shows them anyway."),
    ] = False,
) -> None:
    """Train a policy by asynchronous reinforcement learning, then print its summary and its alarms' findings."""
    with importing():
        from stretto.launch.preflight.descriptors import check_descriptors

        print(f"checking {recipe}", flush=True)
        check_descriptors()
    if ray is not None:
        overrides = [*(overrides or []), 'cluster.placer="ray"', f'cluster.ray="{ray}"']
    # a dry run tells mistakes of paths together with all others
    modules = refuse_training(recipe, overrides or [], run_dir, resume, paths=not dry_run)
    if dry_run:
        with importing():
            from stretto_app.extensions.preflight.dry_run import check
        check(recipe, overrides or [], resume, run_dir)
        return
    with forking(modules) as spawner:
        with importing():
            from stretto.launch.train import prepare
        prepared = prepare(recipe, overrides or [], run_dir, resume)
        from stretto_report.audit.alarms import AlarmWatch
        from stretto_report.dashboard.terminal.progress import open_display

        print(f"run folder {prepared.path}\nin the browser: stretto watch {prepared.path}", flush=True)
        alarms = AlarmWatch(prepared.path)
        alarms.recall(prepared.beginning.version)
        with open_display(prepared.steps, alarms=alarms, verbose=verbose, note=prepared.note) as display:
            code = prepared.train(display, spawner)
    from stretto_report.dashboard.terminal.summary import print_inspection

    print_inspection(prepared.path)
    print(harmless("\n".join(alarms.findings().lines())))
    if plots:
        # imported only now: matplotlib takes a second, for which neither a mistake nor the training should wait
        from stretto_report.dashboard.plots import plot_run

        for plot in plot_run(prepared.path):
            print(f"plot  {plot}")
    raise typer.Exit(code)


app.command()(plan)


@app.command()
def sft(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The folder to create for the trained policy.")],
    overrides: Overrides = None,
) -> None:
    """Train on the recipe's demonstrations (its [warm_start]), and write a Hugging Face folder."""
    with forking(refuse_recipe(recipe, overrides or [])) as spawner:
        with importing():
            from stretto_app.extensions.commands.supervised import sft
            from stretto_report.dashboard.terminal.progress import open_display

        with open_display(0) as display:
            sft(recipe, overrides or [], out, display.learning, spawner)
    print(f"policy written to {out}")


@app.command()
def dpo(
    recipe: RecipeFile,
    out: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="The folder to create for the trained policy.")],
    overrides: Overrides = None,
) -> None:
    """Train on the recipe's preference pairs (its [preferences]) by DPO, and write a Hugging Face folder."""
    with forking(refuse_preferences(recipe, overrides or [])) as spawner:
        with importing():
            from stretto_app.extensions.commands.dpo import dpo
            from stretto_report.dashboard.terminal.progress import open_display

        with open_display(0) as display:
            dpo(recipe, overrides or [], out, display.learning, display.say, spawner)
    print(f"policy written to {out}")


@app.command("eval")
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face folder.")],
    overrides: Overrides = None,
    task: Annotated[
        Path | None,
        typer.Option(
            metavar="RECIPE.toml|FILE.jsonl", help="The held-out prompts: those of a recipe, or all rows of a file."
        ),
    ] = None,
    data: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option(
            metavar="FILE|FOLDER|HUB_NAME|reasoning-gym:TASK",
            help="All rows of a dataset (repeatable); source.KEY=VALUE sets a key of its source, as in a recipe. The "
            "seeds follow from a question's id: NAME:ROW as in a recipe's sources, ROW with --task FILE.jsonl, so the "
            "two sample other completions of the same questions.",
        ),
    ] = None,
    mapping: Annotated[
        str | None, typer.Option(help="Built-in mapping from the rows of --data to questions, such as gsm8k.")
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", min=1, max=1024, help="Completions of each question [default: evaluation.samples, 1]."),
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="File to which the results of each question are written.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a policy on held-out prompts: accuracy (avg@n) with its interval, pass@k, maj@n, lengths, truncation."""
    if (task is None) == (not data):
        raise typer.BadParameter("give either --task or --data")
    if task is not None and task.suffix != ".jsonl":
        refuse_file(task)
    refuse_model(model)
    with forking() as spawner:
        with importing():
            from stretto_app.extensions.commands.evaluate import Asked, DataChoice, evaluate

        asked = task if task is not None else DataChoice(tuple(data or ()), mapping)
        evaluation = evaluate(
            model, asked, overrides or [], spawner, lambda text: print(text, file=sys.stderr), Asked(n, rows)
        )
    print(evaluation.as_json() if json else evaluation.table())


@app.command()
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face folder.")],
    overrides: ServerOverrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients [default: the folder's name].")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="STRETTO_API_KEY", help="Key that clients must send for all but /health."),
    ] = None,
) -> None:
    """Serve a policy through OpenAI's HTTP interface until Ctrl-C.

    Without a key, every client that reaches the address may use the model and the engine's own interface: /generate,
    /abort, /partials, /spans.
    """
    check_packages("stretto serve", "stretto_gateway")
    refuse_model(model)
    with forking() as spawner:
        with importing():
            from stretto_app.extensions.commands.serve import serve

        words = overrides or []
        serve(model, host=host, port=port, name=name, api_key=api_key, overrides=words, spawner=spawner)


@app.command()
def gateway(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face folder with a chat template.")],
    overrides: ServerOverrides = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; an address other than loopback needs --api-key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8010,
    folder: Annotated[Path, typer.Option(help="Folder in which the sessions are recorded.")] = Path("sessions"),
    name: Annotated[
        str | None, typer.Option(help="Name of the model for clients [default: the folder's name].")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="STRETTO_API_KEY",
            help="Key needed to open, reward and show sessions [default: none, and all users of this machine may].",
        ),
    ] = None,
) -> None:
    """Serve sessions to agents until Ctrl-C: Chat Completions, Responses and Anthropic's Messages, with every token on
    record.

    POST /sessions gives an agent its address and its key. Sessions that are recorded in the folder go on.
    """
    check_packages("stretto gateway", "stretto_gateway")
    refuse_model(model)
    with forking() as spawner:
        with importing():
            from stretto_app.extensions.commands.gateway import gateway

        words = overrides or []
        gateway(
            model, host=host, port=port, folder=folder, name=name, api_key=api_key, overrides=words, spawner=spawner
        )


@app.command()
def tinker(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A Hugging Face folder.")],
    overrides: EngineOverrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8030,
    folder: Annotated[Path, typer.Option(help="Folder of requests, results and weights.")] = Path("stretto-tinker"),
    name: Annotated[
        str | None, typer.Option(help="Name of the base model for clients [default: the folder's path].")
    ] = None,
    key: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option(
            metavar="tml-...",
            envvar="STRETTO_TINKER_KEY",
            help="API key of a client (repeatable) [default: every key is accepted].",
        ),
    ] = None,
    models_gib: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GiB of memory for all models in training [default: half of what is free beside the KV cache].",
        ),
    ] = None,
) -> None:
    """Serve the interface of Tinker's SDK until Ctrl-C: training and sampling, each client with its adapters.

    Programs find it by TINKER_BASE_URL. What was acknowledged survives a kill: start it again on the same folder.
    """
    check_packages("stretto tinker", "stretto_tinker", "stretto_verbs")
    refuse_model(model)
    with importing():
        from stretto_app.extensions.commands.tinker import tinker

    keys, told = key or [], overrides or []
    tinker(model, host=host, port=port, folder=folder, name=name, keys=keys, models_gib=models_gib, overrides=told)


app.command()(engine)
app.command()(rank)
app.command()(watch)
app.command()(study)


@app.command()
def scale(
    run: RunFolder,
    changes: Annotated[list[str], typer.Argument(metavar="engines=N", help="How many engines the run is to have.")],
) -> None:
    """Start or end engines of a running run; those that end give their completions to the others."""
    check_packages("stretto scale", "stretto_cluster")
    from stretto_app.extensions.commands.join import scale as change

    print(change(run, changes))


@app.command()
def inspect(
    run: RunFolder,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="Print the number of trajectories in each state, and check the laws.")
    ] = False,
    predicted: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the output of `stretto plan --json` [default: what `stretto plan --run` wrote].",
        ),
    ] = None,
) -> None:
    """Print the summary of a run (accuracy, tokens, staleness, busy share of its roles) and its alarms' findings."""
    refuse_run(run)
    from stretto_report.audit.alarms import findings_of_run
    from stretto_report.audit.check import print_balance
    from stretto_report.dashboard.terminal.summary import print_inspection

    if ledger:
        raise typer.Exit(print_balance(run))
    findings = findings_of_run(run)
    print_inspection(run, as_json=json, also=findings.told(), predicted=predicted)
    if not json:
        print(harmless("\n".join(findings.lines())))


@app.command()
def check(run: RunFolder) -> None:
    """Check the laws of a run against its records alone: nothing lost, nothing trained twice, no bound broken."""
    refuse_run(run)
    from stretto_report.audit.check import check_run, print_findings

    raise typer.Exit(print_findings(check_run(run)))


@app.command()
def replay(
    run: RunFolder,
    first: Annotated[int, typer.Option("--from", metavar="STEP", help="Train the batches after this step.")] = 0,
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045 - as above
        typer.Option(
            "--set", metavar="SECTION.KEY=VALUE", help="Change a setting of [algorithm] or [trainer] (repeatable)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the branch [default: RUN_DIR/branches/NNN].")] = None,
) -> None:
    """Train again on the recorded batches, without generation: bit-equal weights (else exit code 1), unless a setting
    is changed."""
    refuse_run(run)
    with forking() as spawner:
        with importing():
            from stretto_app.extensions.commands.replay import replay

        replayed = replay(run, first, settings or [], out, spawner=spawner)
    print(replayed)
    raise typer.Exit(1 if replayed.equal is False else 0)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN_A", help="A run folder, or a branch of `stretto replay`.")],
    second: Annotated[Path, typer.Argument(metavar="RUN_B", help="Another run folder or branch.")],
) -> None:
    """Print the first step at which two runs differ, and the fields that do; exits with 1 if there are any."""
    from stretto_report.audit.diff import diff_runs

    parting = diff_runs(first, second)
    print(harmless(str(parting)))
    raise typer.Exit(1 if parting.fields else 0)


app.command()(export)
_COMMAND = typer.main.get_command(app)


def _open_streams() -> None:
    """Open the standard streams that the caller has closed (``stretto ... <&-``) on the null device: Python has None in
    their place. Letters that the encoding of the terminal lacks are shown as JSON's escapes: what is JSON stays it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        codecs.register_error("json", _escaped)
        sys.stdout.reconfigure(errors="json")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return dumps(error.object[error.start : error.end])[1:-1], error.end


def main() -> None:
    """Run the command of `sys.argv`, and end the process with its exit code. An error of stretto exits with its own
    code (2: a user's mistake), an error of the system (a full disk) with code 1; both print one message without a
    traceback."""
    _open_streams()
    try:
        check_packages("stretto", *ALWAYS)
        _COMMAND()
    except StrettoError as error:
        print(f"stretto: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        print(f"stretto: {described(error)}", file=sys.stderr)
        sys.exit(1)
    except UnicodeEncodeError as error:  # a name of a file that cannot be shown, or written into a JSON file
        print(f"stretto: {error.object!a:.200}: is no UTF-8 text; give the file another name", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
