"""Who may import whom, and what is imported only where it is used."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "kvsim"
FLOORS = (
    ("__main__", "__init__"),
    ("cli",),
    ("commands",),
    ("api",),
    ("sweeps", "emulation", "shadow", "training"),
    ("run", "calibration"),
    ("plans", "report", "servers", "kv_events"),
    ("engines", "replaying", "cluster", "substrate", "trace", "results"),
    ("engine", "states"),
    ("policies",),
    ("bounds",),
    ("core",),
    ("installation", "settings", "model", "hardware", "files", "kernels"),
    ("pages", "numbers", "suggest", "hub"),
    ("errors", "conf"),
)
"""Rooms (folders of kvsim, and the files at its root) from the top down. A file imports from its own room and from floors below.

Policies know nothing of the engine that asks them, so the engine stands above their contracts.
"""
LATE = {"torch", "triton", "wandb", "plotly", "httpx", "prometheus_client", "zmq", "aiohttp"}


def modules() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for part in [ROOT, *(ROOT.iterdir())] if part.is_dir() for path in sources(part)
    )


def sources(part: Path) -> Iterator[Path]:
    return part.glob("*.py") if part == ROOT else part.rglob("*.py")


@cache
def imported(module: str, *, with_functions: bool = True) -> frozenset[str]:
    """Full names of what the module imports when it is loaded and, ``with_functions``, late and for type checkers, too."""
    names: set[str] = set()
    pending: list[ast.stmt] = list(ast.parse((ROOT / module).read_text()).body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.Import):
            names |= {name.name for name in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            names |= {f"{statement.module}.{name.name}" for name in statement.names}
        elif isinstance(statement, ast.If) and not with_functions and "TYPE_CHECKING" in ast.unparse(statement.test):
            pending += statement.orelse
        elif with_functions or not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [part for part in ast.iter_child_nodes(statement) if isinstance(part, ast.stmt)]
    return frozenset(names)


def file_of(name: str) -> str | None:
    """The file of kvsim that a full name lies in."""
    path = name.removeprefix("kvsim.").replace(".", "/")
    for place in (f"{path}.py", f"{path.rpartition('/')[0]}.py", f"{path}/__init__.py", f"{path.rpartition('/')[0]}/__init__.py"):
        if name.startswith("kvsim.") and (ROOT / place).is_file():
            return place
    return None


def room_of(module: str) -> str:
    return module.split("/")[0].removesuffix(".py")


def floor_of(module: str) -> int:
    return next(floor for floor, rooms in enumerate(reversed(FLOORS)) if room_of(module) in rooms)


def needs(module: str) -> set[str]:
    """Files of kvsim that the module imports."""
    return {file for name in imported(module) if (file := file_of(name)) is not None} - {module}


def test_every_room_has_a_floor() -> None:
    assert {room_of(module) for module in modules()} == {room for rooms in FLOORS for room in rooms}


def test_no_import_goes_up() -> None:
    """Not for type checkers, and not late, when a function is called, either."""
    for module in modules():
        others = [file for file in needs(module) if room_of(file) != room_of(module)]
        assert [file for file in others if floor_of(file) >= floor_of(module)] == [], module


def test_no_files_import_each_other() -> None:
    """Not even by way of others, for type checkers or late."""
    sorter = TopologicalSorter({module: needs(module) for module in modules()})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_heavy_packages_are_imported_where_they_are_used() -> None:
    for module in modules():
        heavy = {name.split(".")[0] for name in imported(module, with_functions=False)} & LATE
        assert not heavy or module.startswith(("substrate/hardware/", "kernels/", "calibration/")), module


def test_linked_folders_are_imported_as_parts_of_kvsim() -> None:
    names = {name.split(".")[0] for module in modules() for name in imported(module)}
    assert not names & {"policies", "kernels", "conf"}
