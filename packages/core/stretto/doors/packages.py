"""Loading objects from packages beside the core; errors name a missing package and how to install it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stretto import __version__
from stretto.core.errors import Problem, RecipeError

_CORE, _APPLICATION = "stretto", "stretto_app"
#: Packages that `pip install stretto` installs; every other package is an extra.
_ALWAYS = (_APPLICATION, "stretto_report", "stretto_verify")


def is_there(*packages: str) -> bool:
    """Whether all of these packages are installed."""
    return all(find_spec(package) is not None for package in packages)


def check_packages(place: str, *packages: str) -> None:
    """Check that packages are installed, in the version of the core. `place`: the recipe key or command that needs
    them, for messages.

    Raises:
        RecipeError: a package is missing, or has another version.
    """
    if missing := [package for package in packages if not is_there(package)]:
        shown, are = " and ".join(map(_distribution, missing)), "is" if len(missing) == 1 else "are"
        raise RecipeError([Problem(place, f"needs {shown}, which {are} not installed", _remedy(missing))])
    for package in packages:
        shown = _distribution(package)
        version = getattr(import_module(package), "__version__", "none")
        if version != __version__:
            found = f"{shown} is version {version}, and {_CORE}-core is version {__version__}"
            raise RecipeError([Problem(place, found, "all packages of stretto need one version")])


def from_package(name: str, place: str, *needed: str) -> Any:
    """Import a module and return the object `name` names, as ``package.module:name``.

    Args:
        place: the recipe key or command that needs it, for messages.
        needed: further packages that the module imports.

    Raises:
        RecipeError: as `check_packages`.
    """
    module, _, attribute = name.partition(":")
    check_packages(place, module.partition(".")[0], *needed)
    return getattr(import_module(module), attribute)


def _distribution(package: str) -> str:
    return _CORE if package == _APPLICATION else package.replace("_", "-")


def _remedy(missing: Sequence[str]) -> str:
    """Return the command that installs the missing packages.

    >>> _remedy(["stretto_app", "stretto_cluster"]), _remedy(["stretto_report"])
    ("pip install 'stretto[cluster]'", 'pip install stretto')
    """
    extras = ",".join(package.removeprefix("stretto_") for package in missing if package not in _ALWAYS)
    return f"pip install '{_CORE}[{extras}]'" if extras else f"pip install {_CORE}"
