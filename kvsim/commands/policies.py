"""``kvsim policies``: lists every policy that has a YAML file, with its purpose and settings."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kvsim.commands.help import describe
from kvsim.commands.layout import wrapped
from kvsim.errors import UsageError
from kvsim.installation import source_of
from kvsim.plans.arguments import FAMILIES as CONTRACTS
from kvsim.plans.construct import class_of
from kvsim.report.terminal import print_table
from kvsim.settings import catalog
from kvsim.settings.settings_file import read_file
from kvsim.settings.sources import KVSIM, files_of, shown
from kvsim.suggest import closest

FAMILIES: dict[str, type] = {name: CONTRACTS[name] for name in catalog.FAMILIES}
"""The contract of each family."""
USAGE = """usage: kvsim policies [FAMILY [NAME]]

Lists the policies of all families, or of one; or describes one policy with its settings: kvsim policies eviction slru. FAMILY
is eviction, prefetch, placement, checkpoint, routing, scheduling, autoscaling or admission."""


def main(arguments: Sequence[str]) -> None:
    """Print a table for each family of policies or for the one that is named, or all about one policy. Raises UsageError."""
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    if len(arguments) > 2:
        raise UsageError("use kvsim policies, kvsim policies FAMILY or kvsim policies FAMILY NAME")
    if arguments and arguments[0] not in FAMILIES:
        hint = closest(arguments[0], FAMILIES) or f"; choose from {', '.join(FAMILIES)}"
        raise UsageError(f"there is no policy family {arguments[0]!r}{hint}")
    if len(arguments) == 2:
        print("\n".join(description(*arguments)))
        return
    console = Console()
    for family in arguments or FAMILIES:
        rows = list(policies(family))
        print_table(
            console,
            ("name", "purpose", "settings"),
            rows,
            console.width,
            words=(1,),
            left=(0, 1, 2),
            drop=(2,),
            title=f"{family}=NAME",
        )


def description(family: str, name: str) -> Iterator[str]:
    """Yield the lines about a policy: its class's docstring, then when to choose it and its settings, from its YAML file."""
    choice = describe([f"{family}={name}"])
    yield next(choice)
    cls, _ = read_policy(family, catalog.choices(family)[name])
    yield from wrapped(docstring_of(cls).replace("``", ""), indent=2)
    yield ""
    yield from choice


def policies(family: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, purpose, and settings with their defaults of each policy of a family; the user's own first, with files."""
    for name, path in files_of(family).items():
        cls, settings = read_policy(family, path)
        purpose = docstring_of(cls).partition("\n")[0].replace("``", "")
        values = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in settings.items()]
        yield name, purpose if path.is_relative_to(KVSIM) else f"{purpose}\n({shown(path)})", "\n".join(values)


def read_policy(family: str, path: Path) -> tuple[type, dict[str, Any]]:
    """Return the class that a policy's file names, and the settings in it. Raises UsageError for a file that cannot be used."""
    settings = read_file(path)
    try:
        cls: type = class_of(FAMILIES[family], settings, family)
    except UsageError as error:
        raise UsageError(f"{shown(path)}: {error}") from error
    return cls, {name: value for name, value in settings.items() if name != "_target_"}


def docstring_of(cls: type) -> str:
    """Return a class's docstring, from its source: a compiled class has none."""
    source = source_of(cls.__module__)
    tree = ast.parse(source.read_text() if source.is_file() else "")
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    return (ast.get_docstring(found[0]) or "") if found else ""
