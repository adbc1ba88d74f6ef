"""Who may import whom, and what is imported only where it is used."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "kvsim"
ALLOWED = {
    "core": ["core"],
    "policies": ["core", "model", "policies"],
    "engine": ["core", "engine", "errors"],
    "substrate": [
        "core",
        "model",
        "hardware",
        "hardware_curves",
        "copy_rule",
        "kernels",
        "substrate",
        "errors",
        "engine.substrate",
        "engine.outcome",
    ],
    "kernels": ["kernels"],
    "model": [],
    "hardware": ["copy_rule", "hardware_curves"],
    "copy_rule": [],
    "hardware_curves": [],
    "errors": [],
    "trace": ["core", "errors", "trace"],
    "report": ["engine", "core", "errors", "report"],
}
"""What each part imports at run time; imports for type checkers are free. Parts that are not named import anything.

A substrate fulfils the engine's contract, and counts as the outcome wants it.
"""
LATE = {"torch", "triton", "wandb", "plotly"}


def modules() -> list[str]:
    return sorted(
        path.relative_to(ROOT).as_posix() for part in [ROOT, *(ROOT.iterdir())] if part.is_dir() for path in sources(part)
    )


def sources(part: Path) -> Iterator[Path]:
    return part.glob("*.py") if part == ROOT else part.rglob("*.py")


def imported(module: str) -> Iterator[str]:
    """Full names of what the module imports when it is loaded, but for what only type checkers see."""
    pending: list[ast.stmt] = list(ast.parse((ROOT / module).read_text()).body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, ast.Import):
            yield from (name.name for name in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield from (f"{statement.module}.{name.name}" for name in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            pending += [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.Try | ast.With | ast.ClassDef):
            pending += statement.body


@pytest.mark.parametrize("module", modules())
def test_imports_go_one_way(module: str) -> None:
    part = module.split("/")[0].removesuffix(".py")
    if part in ALLOWED:
        ours = [name.removeprefix("kvsim.") for name in imported(module) if name.startswith("kvsim.")]
        assert [name for name in ours if not f"{name}.".startswith(tuple(f"{allowed}." for allowed in ALLOWED[part]))] == []


@pytest.mark.parametrize("module", modules())
def test_heavy_packages_are_imported_where_they_are_used(module: str) -> None:
    heavy = {name.split(".")[0] for name in imported(module)} & LATE
    assert not heavy or module.startswith(("substrate/hardware/", "kernels/"))


def test_linked_folders_are_imported_as_parts_of_kvsim() -> None:
    names = {name.split(".")[0] for module in modules() for name in imported(module)}
    assert not names & {"policies", "kernels", "conf"}
