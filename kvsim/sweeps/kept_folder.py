"""A folder of results that Python may keep: a temporary one lives as long as the object that has it."""

import os
import shutil
import weakref
from pathlib import Path
from typing import Self

from kvsim.errors import UsageError


class Kept:
    """Whoever has this may read a folder: a temporary one goes with the last that has it."""

    def __init__(self, folder: Path, *, is_temporary: bool) -> None:
        if is_temporary:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


class KeptFolder:
    """What has its files in a folder: a sweep, a search, a validation."""

    folder: Path
    kept: Kept | None = None
    """What its runs have as well, so that their files are there without this object."""

    def keep(self, folder: Path, *, is_temporary: bool) -> Self:
        """Have this folder, which goes with the object and its runs if it is temporary."""
        self.folder, self.kept = folder, Kept(folder, is_temporary=is_temporary)
        return self

    def save(self, folder: str | Path) -> None:
        """Copy all files to a new folder, as ``output=`` and the command write them.

        Raises UsageError if it exists or cannot be written, and then leaves nothing behind.
        """
        target = Path(folder)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            shutil.copytree(self.folder, part, ignore=shutil.ignore_patterns(".*"))
            if target.exists():
                raise UsageError(f"{target} already exists: choose another folder")
            part.rename(target)
        except OSError as error:
            raise UsageError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
