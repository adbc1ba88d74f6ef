"""``kvsim policies``: lists every policy that has a YAML file, with its purpose and settings."""

import ast
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import hydra.utils
from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvsim.errors import UsageError

FAMILIES = ("eviction", "prefetch", "placement", "checkpoint", "routing", "scheduling")


def main(arguments: Sequence[str]) -> None:
    """Print one table for each family of policies."""
    if arguments and arguments[0] not in ("-h", "--help"):
        raise UsageError(f"policies takes no arguments, but got {arguments[0]!r}")
    console = Console()
    for family in FAMILIES:
        table = Table(title=f"{family}=NAME", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for column in ("name", "purpose", "settings"):
            table.add_column(column, no_wrap=column == "name")
        for row in policies(family):
            table.add_row(*row)
        console.print(table)


def policies(family: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, purpose, and settings with their defaults of each policy of a family."""
    folder = files("kvsim.conf") / family
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".yaml"):
            settings = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(path.read_text())))
            purpose = purpose_of(settings.pop("_target_"))
            values = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]
            yield path.name.removesuffix(".yaml"), purpose.replace("``", ""), "\n".join(values)


def purpose_of(target: str) -> str:
    """Return the first line of a class's docstring, from its source: a compiled class has none."""
    cls = hydra.utils.get_class(target)
    source = Path(str(import_module(cls.__module__).__file__)).parent / f"{cls.__module__.rpartition('.')[2]}.py"
    found = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return (ast.get_docstring(found[0]) or "").partition("\n")[0] if found else ""
