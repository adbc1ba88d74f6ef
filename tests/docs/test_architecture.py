"""ARCHITECTURE.md: its rooms are those of the program, its recipes are complete, and every file that it names exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_imports import FLOORS, imported, modules, room_of

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
SOURCES = [path for part in ("kvsim", "policies") for path in (ROOT / part).rglob("*.py") if not path.is_symlink()]


def rows(heading: str) -> Iterator[list[str]]:
    """Rows of the table below a heading."""
    section = TEXT[TEXT.index(f"## {heading}") :].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| ") and not line.startswith(("| floor", "| to add")):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def recipe(of: str) -> list[str]:
    """Files of a recipe, in order."""
    cells = next(cells for cells in rows("To add something") if cells[0] == of)
    return re.findall(r"`([\w/.]+)`", cells[1])


def test_the_rooms_stand_on_the_floors_that_imports_keep() -> None:
    named = [(int(floor), re.findall(r"`([\w.]+)`", rooms)) for floor, rooms, _ in rows("The rooms")]
    told = {room.removesuffix(".py"): floor for floor, names in named for room in names}
    known = {room: floor for floor, rooms in enumerate(reversed(FLOORS), 1) for room in rooms}
    assert {room: floor - (floor == len(FLOORS)) for room, floor in known.items() if room != "__init__"} == told


def test_every_path_exists() -> None:
    paths = {
        path
        for path in re.findall(r"`((?:kvsim|policies|conf|tests)/[\w/.]+)`", TEXT)
        if "NAME" not in path and "FAMILY" not in path
    }
    figure = TEXT[TEXT.index("## The way of a request") :].split("```")[1]
    paths |= {f"kvsim/{path}" for path in re.findall(r"([a-z]+/[a-z_]+\.py)", figure)}
    assert len(paths) > 27 and sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_a_kind_of_tier_is_named_in_the_files_of_its_recipe_only() -> None:
    """``remote`` is the latest kind. No other file knows it, so none would need a change for the next one."""
    word = re.compile(r"""["'.]remote["'.\s,)]|\bREMOTE\b|\bremote_""")
    naming = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if "substrate/hardware" not in path.as_posix() and word.search(re.sub(r"remote_gpu", "", path.read_text()))
    }
    refusals = {"kvsim/plans/substrate_choice.py", "kvsim/plans/combinations.py"}
    """What it cannot do: real hardware, and settings that exclude each other."""
    assert naming - refusals <= set(recipe("a kind of tier"))


@pytest.mark.parametrize(
    "engine", sorted(path.name for path in (ROOT / "kvsim" / "engines").iterdir() if (path / "rules.py").exists())
)
def test_nothing_but_its_settings_files_names_an_engine(engine: str) -> None:
    users = [module for module in modules() if any(name.startswith(f"kvsim.engines.{engine}.") for name in imported(module))]
    assert {room_of(module) for module in users} == {"engines"} and all(
        module.startswith(f"engines/{engine}/") for module in users
    )
    assert any(f"kvsim.engines.{engine}.rules." in path.read_text() for path in (ROOT / "conf" / "rules").glob("*.yaml"))


def test_a_reader_of_traces_is_named_by_its_settings_file_and_where_formats_are_recognised() -> None:
    targets = {
        re.search(r"_target_: kvsim\.trace\.(\w+)\.", path.read_text()) for path in (ROOT / "conf" / "trace").glob("*.yaml")
    }
    for reader in {found[1] for found in targets if found} - {"auto", "synthetic"}:
        users = {module for module in modules() if any(name.startswith(f"kvsim.trace.{reader}.") for name in imported(module))}
        assert {room_of(module) for module in users} <= {"trace"}, reader


def test_no_policy_is_named_outside_its_family_but_as_a_default_or_a_bound() -> None:
    named = {
        name.rpartition(".")[0].removeprefix("kvsim.policies.")
        for module in modules()
        if room_of(module) not in ("policies", "commands", "calibration", "training")
        for name in imported(module)
        if re.fullmatch(r"kvsim\.policies\.[a-z]+\.[a-z_0-9]+\.\w+", name)
    }
    concrete = {name for name in named if not name.endswith((".base", ".context", "_table", "_order"))}
    assert concrete <= {
        "eviction.belady", "eviction.lru", "placement.write_through", "prefetch.none", "checkpoint.none",
        "checkpoint.retention", "routing.least_loaded",
    }  # fmt: skip
