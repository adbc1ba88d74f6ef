"""Whether the hot parts of kvsim are compiled, and whether they are those of the sources beside them."""

import os
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from zlib import crc32

from kvsim.errors import UsageError

PACKAGE = Path(__file__).resolve().parent
SUFFIX = EXTENSION_SUFFIXES[0]
"""Of this interpreter's extension modules: another one neither loads nor sees them, and runs pure Python."""
RECORD = f"compiled{SUFFIX}.txt"
"""What a build leaves in the package: a line for each compiled module, with the checksum of its source."""
SHARED_LIBRARY = f"compiled__mypyc{SUFFIX}"
"""In the package: the code of all compiled modules. Their own files only name it."""
REMEDY = (
    "run `make compiled` to build again, or `make pure` to run without compiled modules; an installed kvsim: install it again"
)


class StaleBuild(UsageError, ImportError):
    """Compiled modules that do not belong to the sources beside them."""


@cache
def build_name() -> str:
    """``compiled`` or ``pure Python``. Raises StaleBuild."""
    return "compiled" if is_compiled() else "pure Python"


def is_compiled(package: Path = PACKAGE) -> bool:
    """Whether there are compiled modules, all of them and of the sources that are there. Raises StaleBuild if only some are.

    Contents are compared, not times: a checkout touches files that it does not change. A source that was never compiled, such
    as a user's own policy, is ordinary Python beside them.
    """
    built = set(_extension_modules(package))
    if not built:
        return False
    recorded = _recorded(package / RECORD)
    if missing := sorted(recorded.keys() - built) or sorted(built - recorded.keys()):
        raise StaleBuild(f"only a part of kvsim is compiled ({_some(missing)} does not belong to the rest): {REMEDY}")
    if not (package / SHARED_LIBRARY).exists():
        raise StaleBuild(f"{SHARED_LIBRARY} is missing, and with it the code of the compiled modules: {REMEDY}")
    found = {source: checksum(package / source) for source in recorded}
    if any(found.values()) and (changed := [source for source in sorted(recorded) if found[source] != recorded[source]]):
        raise StaleBuild(f"compiled modules are older than their sources ({_some(changed)}): {REMEDY}")
    return True


def checksum(source: Path) -> str | None:
    """Of a source's bytes; None if there is no such file."""
    try:
        return f"{crc32(source.read_bytes()):08x}"
    except FileNotFoundError:
        return None


def write_record(package: Path, checksums: dict[str, str | None]) -> None:
    """Note of which sources, named from the package's folder, the compiled modules are."""
    lines = [f"{checksums[source]} {source}\n" for source in sorted(checksums)]
    (package / RECORD).write_text("".join(lines))


def remove(package: Path = PACKAGE) -> None:
    """Delete what a build has left in the package, if there is any."""
    if package.exists():
        for source in list(_extension_modules(package)):
            (package / f"{source.removesuffix('.py')}{SUFFIX}").unlink()
    for name in (RECORD, SHARED_LIBRARY):
        (package / name).unlink(missing_ok=True)


def _recorded(record: Path) -> dict[str, str]:
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        raise StaleBuild(f"{record.name} is missing, which names the sources of the compiled modules: {REMEDY}") from None
    return {source: checksum for checksum, source in (line.split(" ", 1) for line in lines)}


def _extension_modules(folder: Path, within: str = "") -> Iterator[str]:
    """The sources that compiled modules stand for, named from the package's folder."""
    for entry in os.scandir(folder):
        if entry.name.endswith(SUFFIX):
            if entry.name != SHARED_LIBRARY:
                yield f"{within}{entry.name.removesuffix(SUFFIX)}.py"
        elif entry.is_dir() and entry.name not in ("__pycache__", "conf"):
            yield from _extension_modules(Path(entry.path), f"{within}{entry.name}/")


def _some(sources: list[str]) -> str:
    others = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0]}{others}"
