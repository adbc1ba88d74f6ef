"""``kvsim policies``: lists every policy that has a YAML file, with its purpose and settings."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from inspect import getdoc
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
            purpose = getdoc(hydra.utils.get_class(settings.pop("_target_"))) or ""
            values = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]
            yield path.name.removesuffix(".yaml"), purpose.splitlines()[0].replace("``", ""), "\n".join(values)
