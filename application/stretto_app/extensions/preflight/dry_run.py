"""`stretto train --dry-run`: checks a recipe and says what its run would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stretto.core.errors import several
from stretto.doors.loading import from_package
from stretto.launch.preflight.checks import ASSUMED
from stretto.launch.preflight.devices import placed, seats_of, usable_gpus
from stretto.launch.preflight.plan import Outline, make_plan
from stretto.launch.recipe.recipe import Recipe, load_recipe
from stretto.launch.train import fitting, place_of_run, prepare
from stretto.store.run_folder import RunFolder
from stretto_app.extensions.preflight.estimates import estimate_disk, estimate_memory, step_and_run, warnings
from stretto_app.extensions.preflight.paper import is_on_paper, outline


def check(recipe_path: Path, overrides: Sequence[str], resume: bool = False, run_dir: Path | None = None) -> None:
    """Check a recipe and print a summary, as `stretto train --dry-run` does; nothing is started. If the model folder
    has no weights, everything else is checked, and the skipped checks are named.

    Args:
        resume: check that a run can be resumed; its folder is then `run_dir`, or `recipe_path` if that is None.
        run_dir: where the run folder will be, which is checked but not made; None: a folder in ``runs``.

    Raises:
        UserError: the recipe, the run or `run_dir` has mistakes; lists all of the first stage that has any.
    """
    if resume:
        prepared = prepare(recipe_path, overrides, run_dir, resume, write=False)
        prepared.folder.release()
        plan: Outline = prepared.plan
        folder = prepared.path
        for sentence in prepared.beginning.sentences():
            print(f"resume      {sentence}")
    else:
        wanted, folder = load_recipe(recipe_path, overrides), run_dir or Path.cwd() / "runs"
        plan = _seated(outline(wanted)) if is_on_paper(wanted) else fitting(make_plan(wanted, dry=True), dry=True)
        RunFolder.check_new(place_of_run(recipe_path, run_dir))
    recipe = plan.recipe
    print(f"recipe      {recipe_path}")
    for label, sentence in zip(("a step", "the run"), step_and_run(plan), strict=True):
        print(f"{label:<12}{sentence}")
    print(f"model       {plan.base.path}: {plan.base.architecture}, {plan.base.parameters:,} parameters")
    asked = len(plan.held_out)
    part = "" if asked == plan.kept_apart else f" (evaluation.prompts = {asked:,} are evaluated)"
    held_out = f"{plan.kept_apart:,} held out{part}, {several(len(plan.demonstrations), 'demonstration')}"
    print(f"questions   {len(plan.training):,} for training, {held_out}")
    tokens = f"prompt {plan.longest_prompt} + completion {several(plan.sampling.max_tokens, 'token')}"
    print(f"longest     {tokens}, context {plan.base.context_length}")
    print(f"memory      {estimate_memory(plan)}")
    for sentence in placed(plan, plan.seats) or (unplaced(recipe),):
        print(f"devices     {sentence}")
    if is_on_paper(recipe):
        from_plan = "stretto_app.extensions.commands.plan:memory_per_device"
        print(f"per device  {from_package(from_plan, '--dry-run', 'stretto_foresight')(plan)}")
    print(f"disk        {estimate_disk(plan, folder)}")
    found = warnings(plan, folder)
    for warning in found:
        print(f"warning     {warning}")
    found_any = f"{len(found)} warning{'s' * (len(found) > 1)}" if found else "no problems found"
    print(f"{found_any}; nothing was started")


def _seated(plan: Outline) -> Outline:
    return replace(plan, seats=seats_of(plan, usable_gpus(plan.recipe, dry=True)))


def unplaced(recipe: Recipe) -> str:
    """Return the line for a machine without GPUs: that roles run on the CPU, or which keys ask for a GPU."""
    sections = {"trainer": recipe.trainer} | ({"engine": recipe.engine} if recipe.local_engines else {})
    wanted = [f"{name}.device" for name, section in sections.items() if section.device == "cuda"]
    if not wanted:
        return "every role of this machine runs on the processor"
    asks = "asks" if len(wanted) == 1 else "ask"
    return (
        f"{' and '.join(wanted)} {asks} for a GPU, and this machine shows none; {ASSUMED}=8x80 assumes eight of 80 GiB"
    )
