"""Loading the parts that a recipe names: built-in ones by name, user-defined ones as ``package.module:name`` from the
import path, and those of packages beside the core, whose absence is an error that says how to install them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stretto import __version__
from stretto.core.errors import Problem, RecipeError, nearest

_CORE, _APPLICATION = "stretto", "stretto_app"
#: Packages that `pip install stretto` installs; every other package is an extra.
ALWAYS = (_APPLICATION, "stretto_kernels", "stretto_report", "stretto_verbs", "stretto_verify", "stretto_workflows")


def is_there(*packages: str) -> bool:
    """Whether all of these packages, given by import name, are installed."""
    return all(find_spec(package) is not None for package in packages)


def check_packages(place: str, *packages: str) -> None:
    """Check that packages, given by import name, are installed in the version of the core. `place`: the recipe key or
    command that needs them, for messages. Raises RecipeError if a package is missing, or has another version."""
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
    """Import a module of a package beside the core, and return the object `name` of it, as ``package.module:object``.
    `place`: the recipe key or command that needs it, for messages. `needed`: further packages that the module imports.
    Raises RecipeError if a package is missing, or has another version."""
    module, _, attribute = name.partition(":")
    check_packages(place, module.partition(".")[0], *needed)
    return getattr(import_module(module), attribute)


def of_application(name: str, without: Any) -> Any:
    """Import and return the object `name` of the package stretto_app, as ``module:object``; return `without` if that
    package is not installed. Raises RecipeError if it is installed in another version."""
    return from_package(f"{_APPLICATION}.{name}", _CORE) if is_there(_APPLICATION) else without


def _distribution(package: str) -> str:
    return _CORE if package == _APPLICATION else package.replace("_", "-")


def _remedy(missing: Sequence[str]) -> str:
    """Return the command that installs the missing packages.

    >>> _remedy(["stretto_app", "stretto_cluster"]), _remedy(["stretto_report"])
    ("pip install 'stretto[cluster]'", 'pip install stretto')
    """
    extras = ",".join(package.removeprefix("stretto_") for package in missing if package not in ALWAYS)
    return f"pip install '{_CORE}[{extras}]'" if extras else f"pip install {_CORE}"


_IMPORTERS = (importlib.__file__, __file__)
_ENVIRONMENT = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def look_in(folder: str) -> None:
    """Make imports search `folder` first, then the working directory, then the environment. Changes `sys.path`.

    Loaded modules from another folder that have the names of modules in `folder` are unloaded, except those of the
    environment. An empty `folder` changes nothing.
    """
    if not folder:
        return
    first = [str(Path(folder).resolve()), os.getcwd()]
    sys.path[:] = [*dict.fromkeys(first), *(path for path in sys.path if path not in first)]
    importlib.invalidate_caches()
    for name in _of_others(Path(first[0])):
        for loaded in [one for one in sys.modules if f"{one}.".startswith(f"{name}.")]:
            del sys.modules[loaded]


def _of_others(folder: Path) -> list[str]:
    """List the names of modules in `folder` under which a module of another folder is loaded. Modules of the
    environment are left out."""
    found = []
    for path in (*folder.glob("*.py"), *folder.glob("*/__init__.py")):
        name = path.parent.name if path.name == "__init__.py" else path.stem
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded and name != _CORE and Path(loaded).resolve() != path and not loaded.startswith(_ENVIRONMENT):
            found.append(name)
    return found


def is_own(name: object) -> bool:
    """Whether a name is that of a user-defined part: ``module:name``.

    >>> is_own("my_losses:clipped"), is_own("ppo")
    (True, False)
    """
    return isinstance(name, str) and ":" in name


def with_colon(name: str) -> str:
    """Say how a user-defined part is written, where `name` is none: the user may mean one.

    >>> with_colon("my_losses.clipped"), with_colon("cispo")
    ("one of your own is written 'my_losses:clipped'", "one of your own is written 'package.module:name'")
    """
    module, _, attribute = name.rpartition(".")
    written = f"{module}:{attribute}" if module and attribute else "package.module:name"
    return f"one of your own is written {written!r}"


def load(name: str, place: str, what: str, built_in: Mapping[str, str]) -> object:
    """Import and return the part called `name`. The working directory is added to `sys.path` if it is missing.

    Args:
        place: recipe key, for messages.
        what: name of the kind of part, for messages: "loss".
        built_in: built-in parts: name: ``package.module:name``.

    Raises:
        RecipeError: no built-in part has the name, or its package is not installed, or the module cannot be imported or
            does not have it.
    """
    module, attribute = _named(name, place, what, built_in)
    if name in built_in:
        check_packages(f"{place}: {name!r}", module.partition(".")[0])
    return _attribute(place, module, attribute, _imported(place, module))


def check_source(name: str, place: str, what: str, built_in: Mapping[str, str], folder: str | None) -> None:
    """Check that the part called `name` exists, without importing it: the source text of a user-defined part is read,
    if its module is in `folder` or the working directory. Of a dotted name after the colon only the first part is
    looked for. A module elsewhere, a missing one in a package that exists, and one whose text does not tell pass. The
    other arguments are those of `load`: `place` and `what`, for messages, and the table of built-in parts.

    Raises:
        RecipeError: no built-in part has the name, the module's top package is nowhere, or the module's text does not
            define the name.
    """
    module, attribute = _named(name, place, what, built_in)
    if name in built_in:
        return
    try:
        tree = _source(module, folder)
    except ModuleNotFoundError as error:
        raise RecipeError([_not_imported(place, module, error, folder)]) from None
    first = attribute.partition(".")[0]
    if tree is not None and (defined := _bound(tree)) is not None and first not in defined:
        near = nearest(first, [name for name in _parts_of(tree) if name[0] != "_"])
        raise RecipeError([Problem(place, f"{module!r} has no {attribute!r}", near)])


def _source(module: str, folder: str | None) -> ast.Module | None:
    """Parse the source file of a module in `folder` or the working directory. None: the module is elsewhere, or has no
    source file that can be parsed. Raises ModuleNotFoundError if its top package is nowhere."""
    names = module.split(".")
    spec = PathFinder.find_spec(names[0], [*filter(None, (folder,)), os.getcwd()])
    if spec is None or spec.origin is None:  # a folder without `__init__.py` comes behind every package with one
        try:
            other = find_spec(names[0])
        except ValueError:  # `__main__`, a script, has no spec
            return None
        if spec is None and other is None:
            raise ModuleNotFoundError(f"No module named {names[0]!r}", name=names[0])
        if other is not None and other.origin is not None:
            return None
    for name in names[1:]:
        inner = None if spec is None else spec.submodule_search_locations
        # Without the packages before it: of a folder without `__init__.py` they would have to be imported.
        spec = None if inner is None else PathFinder.find_spec(name, [*inner])
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        return ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # its import will say what is wrong
        return None


def _parts_of(tree: ast.Module) -> list[str]:
    """Names of the functions and classes on the top level of a module."""
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]


#: Words in the text of a module that may define names which no other word of it does.
_HIDDEN = {"*", "__getattr__", "exec", "globals", "locals", "modules", "setattr", "vars", "__dict__"}


def _bound(tree: ast.Module) -> set[str] | None:
    """All names that are bound anywhere in a module, each part of an imported module's name among them; None if the
    text cannot tell, since it has a word of `_HIDDEN`, such as `exec` or a star import."""
    names, others = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=known):
                first, *inner = name.split(".")
                names.update((known or first, *inner))
            case ast.ImportFrom(module=str(module)):
                names.update(module.split("."))
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case ast.Name(id=name) | ast.Attribute(attr=name):
                others.add(name)
                names.update({name} if isinstance(node.ctx, ast.Store) else ())
    return None if _HIDDEN & (names | others) else names


def _named(name: str, place: str, what: str, built_in: Mapping[str, str]) -> tuple[str, str]:
    """Module and attribute of the part called `name`, in the table `built_in` or as "module:name". `place`, `what`:
    recipe key and kind of part, for messages. Raises RecipeError if the name is neither."""
    if not is_own(name) and name not in built_in:
        remedy = f"{nearest(name, built_in)}; {with_colon(name)}"
        raise RecipeError([Problem(place, f"no built-in {what} is called {name!r}", remedy)])
    module, _, attribute = built_in.get(name, name).partition(":")
    plain = module.removesuffix(".py").strip("./").replace("/", ".")  # of a file's path
    if not (module and attribute) or module != plain:
        written = f"{plain}:{attribute}" if plain and attribute else "package.module:name"
        raise RecipeError([Problem(place, f"{name!r} names no {what}", f"it is written {written!r}")])
    return module, attribute


def _imported(place: str, module: str) -> object:
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:  # the program `stretto` begins with its own folder
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    # The module is user-defined: anything its import raises, SystemExit included, becomes the message.
    except (Exception, SystemExit) as error:
        raise RecipeError([_not_imported(place, module, error)]) from error


def _not_imported(place: str, module: str, error: BaseException, folder: str | None = None) -> Problem:
    found = f"cannot import {module!r}: {type(error).__name__}: {error}"
    return Problem(place, found, _way_out(module, error, folder))


def _attribute(place: str, module: str, attribute: str, found: object) -> object:
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = nearest(part, _defined(found))
            raise RecipeError([Problem(place, f"{module!r} has no {attribute!r}", near)]) from None
        except Exception as error:  # of a module's own `__getattr__`, or of a property
            said = f"{module!r} gives no {attribute!r}: {type(error).__name__}: {error}"
            raise RecipeError([Problem(place, said, _way_out(module, error, None))]) from error
    return found


def _defined(found: object) -> list[str]:
    """List the public names of functions and classes that a module or class defines itself; imported ones are left
    out."""
    home = getattr(found, "__name__" if inspect.ismodule(found) else "__module__", None)
    items = getattr(found, "__dict__", {}).items()
    return [name for name, one in items if name[0] != "_" and getattr(one, "__module__", None) == home]


def _way_out(module: str, error: BaseException, folder: str | None) -> str:
    """Advice after `error` at the import of `module`: it is not found, it imports a missing module, or its code
    raises. `folder`: searched for near names, beside the folders of imports."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module}.".startswith(f"{missing}."):
        return (
            _near_module(missing, folder)
            or "give a module of the environment, of the recipe's folder or of the folder that stretto is started from"
        )
    where = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else where_raised(error) or module
    if missing is not None:
        return f"{where} imports {missing!r}, which is not in the environment of stretto: install it there"
    return f"raised in {where}"


def _near_module(missing: str, folder: str | None) -> str:
    """Suggest a module that stands where `missing` was looked for: in its package, or in `folder` and the folders of
    imports but those of the environment. "" if none has a similar name."""
    package, _, name = missing.rpartition(".")
    paths = getattr(sys.modules.get(package), "__path__", ()) if package else [folder or "", os.getcwd(), *sys.path]
    places = [Path(path) for path in paths if package or not path.startswith(_ENVIRONMENT)]
    files = [(place, file) for place in places for file in (*place.glob("*.py"), *place.glob("*/*.py"))]
    near = nearest(name, {file.stem if file.parent == place else file.parent.name for place, file in files})
    return near if near.startswith("did") else ""


def where_raised(error: BaseException, file: str = "") -> str:
    """Return ``file:line`` of the innermost frame of `file` in the error's traceback; if it has none, of the innermost
    frame, or `file` itself if that frame is one of stretto, whose call does not fit; "" if the traceback has no frames.
    Frames of the import system do not count."""
    frames = [(one.f_code.co_filename, line, one) for one, line in traceback.walk_tb(error.__traceback__)]
    inner = [one for one in frames if not one[0].startswith("<frozen") and one[0] not in _IMPORTERS]
    found = [one for one in inner if one[0] == file] or inner
    if not found:
        return ""
    name, line, frame = found[-1]
    ours = file and name != file and str(frame.f_globals.get("__name__", "")).startswith(_CORE)
    return file if ours else f"{name}:{line}"


def why_not_called(function: object, name: str, arguments: Sequence[str], further: Sequence[str] = ()) -> str:
    """Return why the part `function` cannot be called with the positional `arguments` and the keyword arguments
    `further`, given by name; "" if it can, or has no signature to tell. `name`: of the part, for the message."""
    if not callable(function):
        return f"{name!r} is {type(function).__name__}, which cannot be called"
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(further))
    except TypeError as error:
        return f"{name!r} has another signature: {error}"
    except ValueError:
        return ""  # some functions written in C have no signature: the first call shows
    return ""


def is_generator(function: Callable[..., object]) -> bool:
    """Whether the function, or the `__call__` method of the object, is a generator function, asynchronous or not."""
    # Of the type: a call does not run an attribute of the instance.
    call = getattr(type(function), "__call__", None)  # noqa: B004
    kinds = (inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    return any(kind(one) for kind in kinds for one in (function, call))
