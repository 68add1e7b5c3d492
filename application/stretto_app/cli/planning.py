"""`stretto plan`: prediction of a run, and calibration of a machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from stretto.doors.loading import check_packages
from stretto_app.cli.mistakes import refuse_recipe

if TYPE_CHECKING:  # of a package that may be missing
    from stretto_app.extensions.commands.machine_choice import PlanChoice


def plan(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE.toml", help="A recipe.")] = None,
    overrides: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads this form on every supported Python
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Replace values of the recipe: trainer.steps=100."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", "--gpu", metavar="FILE|NAME", help="File of --calibrate, or a100, h100, h200, h20."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Devices of the run [default: the recipe's own layout].")] = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of these devices [default: as few as hold them].")] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="400gbit", help="Network rate of one device to other nodes [default: the machine's]."),
    ] = None,
    goal: Annotated[
        str, typer.Option(metavar="time|cost|staleness", help="Quantity that the best layout minimises.")
    ] = "time",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|RUN_DIR|lognormal:mean=M,sigma=S",
            help="Lengths of completions [default: those of the demonstrations, if the recipe has a warm start].",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Folder of the run, begun or not; the plan is written there, and `stretto inspect` compares both.",
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw steps of the best layout, and throughput against the split."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine and write it to --out; about two minutes.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the measured machine.")] = Path("machine.json"),
) -> None:
    """Predict a run before you pay for it: step time, busy shares, staleness, memory and hours of its best layouts."""
    check_packages("stretto plan", "stretto_foresight")
    if calibrate:
        if recipe is not None:
            raise typer.BadParameter("--calibrate measures the machine and takes no recipe")
        _calibrate(out)
        return
    if recipe is None:
        raise typer.BadParameter("give a RECIPE.toml, or --calibrate")
    if machine is None:
        raise typer.BadParameter("give --machine FILE (of `stretto plan --calibrate`) or --gpu NAME, such as h100")
    from stretto_app.extensions.commands.machine_choice import PlanChoice, machine_chosen

    choice = PlanChoice(machine, gpus, nodes, network, goal, lengths, run)
    machine_chosen(choice)
    _plan(recipe, overrides or [], choice, picture, json=json)


def _plan(recipe: Path, overrides: Sequence[str], choice: PlanChoice, picture: Path | None, *, json: bool) -> None:
    refuse_recipe(recipe, overrides)
    from stretto_app.extensions.commands.plan import as_json, plan_recipe, table

    found = plan_recipe(recipe, overrides, choice, _tell)
    if picture is not None:
        from stretto_app.extensions.commands.plan_picture import draw

        draw(found, picture)
    print(as_json(found) if json else table(found))


def _calibrate(out: Path) -> None:
    from stretto_app.extensions.commands.calibrate import calibrate_machine

    print(f"{calibrate_machine(out, _tell).name} is in {out}")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)
