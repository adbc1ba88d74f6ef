"""What disks, other programs and people do to files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

SECTOR_BYTES = 512


def _overwrite(path: Path, byte: bytes) -> None:
    """Fill a sector in the middle, or all of a shorter file."""
    content = path.read_bytes()
    start = len(content) // 2 // SECTOR_BYTES * SECTOR_BYTES
    path.write_bytes(content[:start] + byte * len(content[start : start + SECTOR_BYTES]) + content[start + SECTOR_BYTES :])


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _become_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "0xFF sector": lambda path: _overwrite(path, b"\xff"),
    "zeros": lambda path: _overwrite(path, b"\0"),
    "cut": _cut,
    "another file": lambda path: path.write_bytes(b"\x1f\x8b\x08\0not ours"),
    "another JSON": lambda path: path.write_bytes(b'{"schema": 1, "choices": {}, "config": [NaN, 1e999]}'),
    "deep JSON": lambda path: path.write_bytes(b"[" * 100_000),
    "folder": _become_folder,
    "loop": _become_loop,
}
"""Ways to damage a file, by name."""
QUICK = ("zeros", "another JSON", "folder")
"""What cannot be read, what means something else, and what is no file."""
SOME_DAMAGES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in DAMAGES]
"""All of them for ``make test-long``, one of each kind for ``make test``."""


def copied(folder: Path, target: Path) -> Path:
    """A copy of a folder, to be damaged."""
    shutil.copytree(folder, target)
    return target
