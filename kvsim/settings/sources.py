"""Where policies and their settings come from besides kvsim: the user's project, installed packages and ``--config-dir``.

project        the folder ``kvsim_policies`` in the current folder: a package, with a folder ``conf`` of YAML files
packages       each entry point of the group ``kvsim.policies`` names a package that has a folder ``conf``
--config-dir   a folder of YAML files; its classes lie beside it or in the current folder

Each ``conf`` has the groups of kvsim's own: ``conf/eviction/my_policy.yaml`` is ``eviction=my_policy``. Nothing has to be on
PYTHONPATH.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from kvsim.errors import UsageError

PROJECT = "kvsim_policies"
"""Folder of a user's own policies; the package that contains them."""
ENTRY_POINTS = "kvsim.policies"
FLAG = "--config-dir"
KVSIM = Path(__file__).resolve().parents[1] / "conf"


class Source(NamedTuple):
    """A folder with groups of YAML files."""

    provider: str
    """Who offers it: ``PROJECT``, ``FLAG`` or the name of an entry point."""
    conf: Path


_given: list[Path] = []
"""What ``--config-dir`` of the command that this process runs names."""


def set_up(arguments: Sequence[str]) -> list[str]:
    """Make the user's policies importable for a command, and return its arguments without ``--config-dir``. Raises UsageError."""
    _given.clear()
    rest, words = [], iter(arguments)
    for word in words:
        flag, has_value, value = word.partition("=")
        if flag not in (FLAG, "-cd"):
            rest.append(word)
            continue
        value = value if has_value else next(words, "")
        if not value or not Path(value).is_dir():
            raise UsageError(f"{FLAG}: there is no folder {value!r}")
        _given.append(Path(value).absolute())
    make_importable(source.conf for source in sources())
    return rest


def use(config_sources: Iterable[Any]) -> None:
    """Make importable what a composed configuration can name; ``config_sources`` are those of ``hydra.runtime``.

    For processes in which no command was set up: the workers of a launcher, and Python programs.
    """
    files = [source for source in config_sources if source["schema"] == "file"]
    _given[:] = [Path(source["path"]) for source in files if source["provider"] == FLAG]
    make_importable(Path(source["path"]) for source in files)


def flags(config_sources: Iterable[Any]) -> list[str]:
    """Return the flags with which a command finds the same files."""
    return [word for source in config_sources if source["provider"] == FLAG for word in (FLAG, str(source["path"]))]


def sources() -> list[Source]:
    """Return the folders of settings besides kvsim's own, the user's project first. Raises UsageError."""
    found = [Source(PROJECT, path) for path in (Path.cwd() / PROJECT / "conf",) if path.is_dir()]
    found += [Source(FLAG, path) for path in _given]
    return [*found, *(source for source in _packages() if source.conf not in {other.conf for other in found})]


def files_of(group: str) -> dict[str, Path]:
    """Return the YAML file of each choice of a group, the user's own before kvsim's. Raises UsageError for a name used twice."""
    found: dict[str, Path] = {}
    for conf in (*(source.conf for source in sources()), KVSIM):
        for path in sorted((conf / group).glob("*.yaml")):
            if (other := found.setdefault(path.stem, path)) is not path:
                raise UsageError(f"{group}={path.stem} is defined twice, in {shown(other)} and {shown(path)}: rename one of them")
    return found


def check_names() -> None:
    """Raise UsageError if two sources offer the same choice of a group: which one runs would be unclear."""
    groups = {group.name for source in sources() for group in source.conf.iterdir() if (KVSIM / group.name).is_dir()}
    for group in sorted(groups):
        files_of(group)


def make_importable(folders: Iterable[Path]) -> None:
    """Let the classes that YAML files in these folders name be imported, if nothing else has modules of these names."""
    roots = dict.fromkeys(root for folder in folders for root in (_root(folder), str(folder)))
    _finder.roots = [*roots, os.getcwd()] if roots else []
    if roots and _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def shown(path: Path) -> str:
    """Return a path relative to the current folder if it is inside."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def shadowed(target: str) -> str:
    """Return the file of the module that is imported instead of the user's own of the same name; empty if none is."""
    name = target.partition(".")[0]
    own = PathFinder.find_spec(name, _finder.roots) if name.isidentifier() else None
    found = getattr(sys.modules.get(name), "__spec__", None)
    return "" if own is None or own.origin is None or found is None or found.origin == own.origin else str(found.origin)


class OwnModules(MetaPathFinder):
    """Finds top-level modules in the user's folders that are nowhere else."""

    def __init__(self) -> None:
        self.roots: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Ordinary folders, such as one named ``wandb``, are no modules."""
        spec = None if path is not None else PathFinder.find_spec(name, self.roots)
        return spec if spec is not None and (spec.origin is not None or name == PROJECT) else None


_finder = OwnModules()


def _root(folder: Path) -> str:
    """The folder from which the package that contains this one is imported."""
    root = folder.parent
    while (root / "__init__.py").exists() or root.name == PROJECT:
        root = root.parent
    return str(root)


def _packages() -> list[Source]:
    if not any(_names_policies(folder, changed_ns) for folder, changed_ns in _folders_of_packages()):
        return []
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    found = {}
    for point in sorted(entry_points(group=ENTRY_POINTS)):
        try:
            spec = find_spec(point.value)
        except ImportError:
            spec = None
        conf = [Path(place) / "conf" for place in (spec.submodule_search_locations or ()) if spec] if spec else []
        if not (there := [path for path in conf if path.is_dir()]):
            raise UsageError(f"the entry point {point.name} of {ENTRY_POINTS}: {point.value} is not a package with a folder conf")
        found[there[0]] = Source(point.name, there[0])
    return list(found.values())


def _folders_of_packages() -> Iterable[tuple[str, int]]:
    """Yield the folders from which modules are imported, and when something in them was last installed or removed."""
    for folder in sys.path:
        with suppress(OSError):
            yield folder or os.getcwd(), os.stat(folder or ".").st_mtime_ns


@cache
def _names_policies(folder: str, changed_ns: int) -> bool:
    """Whether a package installed there may have such an entry point: importlib.metadata takes ten times as long to read them."""
    try:
        packages = [entry.path for entry in os.scandir(folder) if entry.name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return False
    return any(ENTRY_POINTS.encode() in _entry_points(package) for package in packages)


def _entry_points(package: str) -> bytes:
    try:
        with open(f"{package}/entry_points.txt", "rb") as file:
            return file.read()
    except OSError:
        return b""
