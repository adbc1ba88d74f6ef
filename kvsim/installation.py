"""Whether the installation is in order: the linked folders are there, and compiled modules match the sources beside them."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from zlib import crc32

from kvsim.errors import UsageError

PACKAGE = Path(__file__).resolve().parent
LINKED = ("policies", "kernels", "conf")
"""In a checkout, symbolic links to the folders of the same names beside the package."""
SUFFIX = EXTENSION_SUFFIXES[0]
"""File suffix of this interpreter's extension modules. Other interpreters ignore such files and run pure Python."""
RECORD = f"compiled{SUFFIX}.txt"
"""The file that a build writes into the package: one line per compiled module, with the checksum of its source."""
SHARED_LIBRARY = f"compiled__mypyc{SUFFIX}"
"""The file in the package that holds the code of all compiled modules; the modules' own files only refer to it."""
REMEDY = "run `make compiled` to rebuild, or `make pure` to run without compiled modules; reinstall kvsim if it is not a checkout"


class BrokenCheckout(UsageError, ImportError):
    """A checkout without symbolic links."""


def check_links(package: Path = PACKAGE) -> None:
    """Raise BrokenCheckout if a link is an ordinary file, as git writes it where symbolic links are switched off (Windows)."""
    broken = [name for name in LINKED if not (package / name).is_dir()]
    if broken:
        raise BrokenCheckout(
            f"kvsim/{broken[0]} is not a symbolic link to the folder {broken[0]}: the checkout has no symbolic links; on "
            "Windows, switch on developer mode, then run `git config core.symlinks true` and `git checkout -- kvsim`"
        )


class StaleBuild(UsageError, ImportError):
    """The compiled modules do not match the sources beside them."""


@cache
def build_name() -> str:
    """Return ``compiled`` or ``pure Python``. Raises StaleBuild."""
    return "compiled" if is_compiled() else "pure Python"


def is_compiled(package: Path = PACKAGE) -> bool:
    """Whether kvsim is compiled. Raises StaleBuild if compiled modules are missing, left over, or older than their sources.

    Checksums are compared rather than modification times, because a checkout updates the times of unchanged files. A source
    that was never compiled, such as a user's own policy, runs as ordinary Python next to the compiled modules.
    """
    built = set(_extension_modules(package))
    if not built:
        return False
    recorded = _recorded(package / RECORD)
    if missing := sorted(recorded.keys() - built) or sorted(built - recorded.keys()):
        raise StaleBuild(f"the compiled modules are incomplete or left over from another build ({_some(missing)}): {REMEDY}")
    if not (package / SHARED_LIBRARY).exists():
        raise StaleBuild(f"{SHARED_LIBRARY}, which holds the code of the compiled modules, is missing: {REMEDY}")
    found = {source: checksum(package / source) for source in recorded}
    if any(found.values()) and (changed := [source for source in sorted(recorded) if found[source] != recorded[source]]):
        raise StaleBuild(f"the compiled modules are older than their sources ({_some(changed)}): {REMEDY}")
    return True


def checksum(source: Path) -> str | None:
    """Return the checksum of a source file, or None if the file does not exist."""
    try:
        return f"{crc32(source.read_bytes()):08x}"
    except FileNotFoundError:
        return None


def write_record(package: Path, checksums: dict[str, str | None]) -> None:
    """Record the sources, by their paths within the package, that the compiled modules were built from."""
    lines = [f"{checksums[source]} {source}\n" for source in sorted(checksums)]
    (package / RECORD).write_text("".join(lines))


def remove(package: Path = PACKAGE) -> None:
    """Delete everything that a build has left in the package."""
    if package.exists():
        for source in list(_extension_modules(package)):
            (package / f"{source.removesuffix('.py')}{SUFFIX}").unlink()
    for name in (RECORD, SHARED_LIBRARY):
        (package / name).unlink(missing_ok=True)


def _recorded(record: Path) -> dict[str, str]:
    try:
        lines = record.read_text().splitlines()
    except FileNotFoundError:
        raise StaleBuild(f"{record.name}, which lists the sources of the compiled modules, is missing: {REMEDY}") from None
    return {source: checksum for checksum, source in (line.split(" ", 1) for line in lines)}


def _extension_modules(folder: Path, within: str = "") -> Iterator[str]:
    """Yield the source of each compiled module, as a path within the package."""
    for entry in os.scandir(folder):
        if entry.name.endswith(SUFFIX):
            if entry.name != SHARED_LIBRARY:
                yield f"{within}{entry.name.removesuffix(SUFFIX)}.py"
        elif entry.is_dir() and entry.name not in ("__pycache__", "conf"):
            yield from _extension_modules(Path(entry.path), f"{within}{entry.name}/")


def _some(sources: list[str]) -> str:
    others = f" and {len(sources) - 1} more" if len(sources) > 1 else ""
    return f"{sources[0]}{others}"


def source_of(module: str) -> Path:
    """Return the source file of a module that has been imported; what it returns for one without may not exist.

    The ``__file__`` of a compiled module is not to be trusted: if another compiled one imports it, it has the package twice.
    """
    first, *rest = module.split(".")
    if first == PACKAGE.name and rest:
        return PACKAGE.joinpath(*rest).with_suffix(".py")
    file = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    return file if file.suffix == ".py" else file.with_name(f"{module.rpartition('.')[2]}.py")
