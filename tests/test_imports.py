"""Who may import whom, and what is imported only where it is used."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "kvsim"
ALLOWED = {
    "core": ["core", "compiled"],
    "policies": ["core", "bounds.reuse", "model", "numbers", "policies"],
    "engines": ["core", "engines", "numbers"],
    "bounds": ["core", "bounds", "numbers"],
    "engine": ["core", "engine", "errors", "numbers"],
    "substrate": [
        "core",
        "model",
        "hardware",
        "hardware_curves",
        "noise",
        "copy_rule",
        "kernels",
        "substrate",
        "errors",
        "numbers",
        "locking",
        "engine.substrate",
        "engine.outcome",
        "engine.job",
        "engine.layout",
    ],
    "kernels": ["kernels"],
    "model": ["numbers"],
    "hardware": ["copy_rule", "hardware_curves", "noise", "numbers"],
    "copy_rule": ["numbers"],
    "hardware_curves": ["numbers"],
    "noise": ["numbers"],
    "errors": [],
    "numbers": [],
    "choices": [],
    "compiled": ["errors"],
    "trace": ["core", "bounds.reuse", "bounds.lru_curve", "errors", "locking", "writing", "numbers", "trace"],
    "suggest": [],
    "locking": ["errors"],
    "writing": ["errors", "locking"],
    "report": ["choices", "suggest", "engine", "core", "errors", "compiled", "locking", "writing", "numbers", "report"],
}
"""What each part imports at run time; imports for type checkers are free. Parts that are not named import anything.

A substrate fulfils the engine's contract, counts as the outcome wants it, and knows which engines there are.
"""
PLAYS_REPLAYS = "bounds/curves.py"
"""Stands above the replays that it plays, unlike the bounds beside it."""
LATE = {"torch", "triton", "wandb", "plotly"}


def modules() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for part in [ROOT, *(ROOT.iterdir())] if part.is_dir() for path in sources(part)
    )


def sources(part: Path) -> Iterator[Path]:
    return part.glob("*.py") if part == ROOT else part.rglob("*.py")


def imported(module: str, *, for_checkers: bool = False, later: bool = False) -> Iterator[str]:
    """Full names of what the module imports when it is loaded.

    With ``for_checkers``, also what only type checkers import; with ``later``, also what functions import when they are called.
    """
    pending: list[ast.stmt] = list(ast.parse((ROOT / module).read_text()).body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.Import):
            yield from (name.name for name in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield from (f"{statement.module}.{name.name}" for name in statement.names)
        elif isinstance(statement, ast.If) and not for_checkers and "TYPE_CHECKING" in ast.unparse(statement.test):
            pending += statement.orelse
        elif later or not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [part for part in ast.iter_child_nodes(statement) if isinstance(part, ast.stmt)]


def file_of(name: str) -> str | None:
    """The file of kvsim that a full name lies in."""
    path = name.removeprefix("kvsim.").replace(".", "/")
    for place in (f"{path}.py", f"{path.rpartition('/')[0]}.py"):
        if name.startswith("kvsim.") and (ROOT / place).is_file():
            return place
    return None


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module: str) -> None:
    part = module.split("/")[0].removesuffix(".py")
    if part in ALLOWED and module != PLAYS_REPLAYS:
        ours = [name.removeprefix("kvsim.") for name in imported(module) if name.startswith("kvsim.")]
        assert [name for name in ours if not f"{name}.".startswith(tuple(f"{allowed}." for allowed in ALLOWED[part]))] == []


def test_no_files_import_each_other() -> None:
    """Not even by way of others, or late, when a function is called."""
    needs = {module: {file_of(name) for name in imported(module, later=True)} - {None} for module in modules()}
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@pytest.mark.parametrize("module", [module for module in modules() if module.startswith("core/")])
def test_the_core_imports_nothing_above_but_for_type_checkers_the_contracts_of_policies(module: str) -> None:
    at_run_time = [name for name in imported(module, later=True) if name.startswith("kvsim.")]
    for_checkers = [name for name in imported(module, later=True, for_checkers=True) if name.startswith("kvsim.")]
    beside = ("kvsim.core.", "kvsim.compiled.")
    assert [name for name in at_run_time if not name.startswith(beside)] == []
    assert [name for name in for_checkers if not name.startswith((*beside, "kvsim.policies."))] == []


@pytest.mark.parametrize("module", modules())
def test_commands_stand_on_the_python_api_and_nothing_else_stands_on_either(module: str) -> None:
    part = module.split("/")[0].removesuffix(".py")
    forbidden = {
        "commands": (),
        "cli": ("kvsim.api.",),
        "__main__": ("kvsim.api.", "kvsim.commands."),
        "__init__": ("kvsim.commands.",),
        "api": ("kvsim.commands.",),
    }
    above = forbidden.get(part, ("kvsim.api.", "kvsim.commands.", "kvsim.cli."))
    names = imported(module, later=True, for_checkers=True)
    assert [name for name in names if f"{name}.".startswith(above)] == []


@pytest.mark.parametrize("module", modules())
def test_heavy_packages_are_imported_where_they_are_used(module: str) -> None:
    heavy = {name.split(".")[0] for name in imported(module)} & LATE
    assert not heavy or module.startswith(("substrate/hardware/", "kernels/"))


def test_linked_folders_are_imported_as_parts_of_kvsim() -> None:
    names = {name.split(".")[0] for module in modules() for name in imported(module)}
    assert not names & {"policies", "kernels", "conf"}
