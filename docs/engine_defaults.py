"""The tables of engines' defaults, from ``engine_defaults.yaml``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("engine_defaults.yaml")


@dataclass(frozen=True, kw_only=True)
class Default:
    """A setting of a preset beside the engine's own."""

    setting: str
    value: Any
    flag: str
    """The engine's option; ``constant`` where it has none."""
    default: Any
    file: str
    """Where that was read, below the folder of the engine."""
    note: str = ""
    """Why another wording is the same choice, or where the default holds."""
    differs: str = ""
    """What differs from the engine's default, and why."""
    command: str = ""
    """The only command with this value; empty for all."""

    is_set_with: tuple[str, ...] = ()
    """Overrides without which the setting has no effect."""

    @property
    def is_worded_alike(self) -> bool:
        """Whether value and default are written alike."""
        return str(self.value).lower() == str(self.default).lower()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Where an engine's defaults were read."""

    name: str
    version: str
    folder: str


def presets() -> dict[str, tuple[Engine, list[Default]]]:
    """Every preset of the file, with its engine and its rows."""
    content = yaml.safe_load(FILE.read_text())
    engines = {name: Engine(**engine) for name, engine in content["engines"].items()}
    return {name: (engines[one["engine"]], list(_rows(one["rows"]))) for name, one in content["presets"].items()}


def _rows(listed: list[Any]) -> Iterator[Default]:
    """The rows of a list, in which a list of shared rows stands for these."""
    for row in listed:
        if isinstance(row, list):
            yield from _rows(row)
        else:
            yield Default(is_set_with=tuple(row.get("with", ())), **{key: value for key, value in row.items() if key != "with"})


def sections() -> str:
    """A section for each preset: its settings, and what the engine has by default."""
    return "\n\n".join(_section(name, engine, rows) for name, (engine, rows) in presets().items())


def _section(name: str, engine: Engine, rows: list[Default]) -> str:
    head = f"### {name} {{ #defaults-{name} }}\n\n[`preset={name}`](presets.md#preset-{name}) and {engine.name}"
    table = ["| kvsim | the engine's own | default | read from | remark |", "|---|---|---|---|---|", *map(_line, rows)]
    return f"{head}, {engine.version}; files are in `{engine.folder}`.\n\n" + "\n".join(table)


def _line(row: Default) -> str:
    where = " ".join(f"`{override}`" for override in row.is_set_with)
    only = f"in `kvsim {row.command}`" if row.command else ""
    limits = ", ".join(filter(None, [f"with {where}" if where else "", only]))
    setting = f"`{row.setting}={_word(row.value)}`" + (f" ({limits})" if limits else "")
    option = row.flag if row.flag == "constant" else f"`{row.flag}`"
    remark = f"**differs:** {row.differs}" if row.differs else row.note
    return f"| {setting} | {option} | {_word(row.default)} | `{row.file}` | {remark} |"


def _word(value: Any) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
