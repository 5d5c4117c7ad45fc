"""``polyattn new-backend``."""

from __future__ import annotations

import importlib
import keyword
import re
import shutil
import tempfile
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from .. import registry
from .._generic import GenericBackend
from ..errors import PolyattnError
from ._app import UsageError

__all__ = ["new_backend", "render"]


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name by which users select the backend.")],
    namespace: Annotated[
        str | None,
        typer.Option(metavar="MODULE", help="The library's array API namespace.", show_default="NAME"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to create.", show_default="polyattn-NAME")
    ] = None,
) -> None:
    """Write the skeleton of a backend: a distribution with an entry point, and a test that runs the conformance kit."""
    module = _checked(name, namespace)
    if any(registry.same_name(name, other) for other in registry.names()):
        raise UsageError(f"NAME: there is a backend called {name!r} already, see polyattn backends; choose another")
    files = render(name, module)
    folder = output if output is not None else Path(f"polyattn-{_slug(name)}")
    _write(folder, files)
    for path in files:
        typer.echo(folder / path)
    if note := _home(module)[1]:
        typer.echo(f"note: {note}")
    typer.echo(f"next: pip install -e {folder} && polyattn check {name}")


def render(name: str, namespace: str) -> dict[str, str]:
    """Return the files of the skeleton, by path, for a backend of that name over a module of the array API."""
    home = _home(namespace)[0]
    # array_api_compat.torch creates arrays of torch; jax.numpy creates arrays of jaxlib, but the library is jax.
    library = namespace if home.startswith(namespace.partition(".")[0]) else home
    package = f"polyattn_{_slug(name).replace('-', '_')}"
    words = {
        "name": name,
        "class_name": "".join(part.capitalize() for part in _slug(name).split("-")) + "Backend",
        "package": package,
        "distribution": f"polyattn-{_slug(name)}",
        "library": library.partition(".")[0],
        "namespace": namespace,
        "array_modules": repr(tuple(dict.fromkeys((library, library.partition(".")[0])))).replace("'", '"'),
        "requirement": _requirement(library.partition(".")[0]),
    }
    templates = {
        "pyproject.toml": "pyproject.toml.in",
        "README.md": "README.md.in",
        f"src/{package}/__init__.py": "plugin.py.in",
        "tests/test_kit.py": "test_kit.py.in",
    }
    skeleton = resources.files(__package__) / "skeleton"
    return {
        path: Template((skeleton / template).read_text(encoding="utf-8")).substitute(words)
        for path, template in templates.items()
    }


def _checked(name: str, namespace: str | None) -> str:
    """Return the namespace; raise if it or the name is not valid in an entry point, a package and an import."""
    if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?", name):
        raise UsageError(
            f"NAME: expected letters, digits, - and _, the first a letter and the last no sign, got {name!r}"
        )
    module = _slug(name).replace("-", "_") if namespace is None else namespace
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in module.split(".")):
        raise UsageError(f"--namespace: expected a module like mylib or mylib.numpy, got {module!r}")
    return module


def _slug(name: str) -> str:
    """Return a backend's name as a part of a distribution's name."""
    return re.sub(r"[-_]+", "-", name).lower()


def _home(namespace: str) -> tuple[str, str]:
    """Return the package that defines a namespace's arrays, and a note, which may be empty."""
    try:
        array = importlib.import_module(namespace).asarray([0.0])
    except Exception as cause:  # it is not installed, or is not a namespace
        return namespace.partition(".")[0], f"{namespace} is no namespace here ({cause}): its packages are guesses"
    try:
        owner = registry.owner(array)
    except PolyattnError as cause:
        note = f"polyattn cannot compute with its arrays yet: {cause}"
    else:
        taken = f"the backend {owner.name!r} owns the arrays of {namespace}, so the checks of ownership will fail"
        note = "" if isinstance(owner, GenericBackend) else taken
    return type(array).__module__.partition(".")[0], note


def _requirement(package: str) -> str:
    """Return the distribution that installs a package; by default one of the same name."""
    providers = metadata.packages_distributions().get(package, [])
    named = package.replace("_", "-")
    return named if named in providers or not providers else providers[0]


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write files into a new folder atomically."""
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"--output: {folder} exists already; name another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            for path, text in files.items():
                (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
                (unfinished / path).write_text(text, encoding="utf-8")
            unfinished.chmod(0o755)
            unfinished.rename(folder)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    except OSError as cause:
        raise PolyattnError(
            f"{folder}: cannot be written: {cause.strerror or cause}; name another --output, or make room"
        ) from cause
