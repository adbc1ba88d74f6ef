"""A trace from standard input, stored in a temporary file so that every process of a sweep can read it."""

import atexit
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

from kvsim.errors import TraceError

MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
"""First bytes of compressed files, and how their names end."""


@cache
def saved_input() -> str:
    """Copy standard input to a temporary file, once per process, and return its path; it is removed when the process ends.

    Raises TraceError if standard input is a terminal or does not fit on the disk.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise TraceError("-", None, "standard input is a terminal: pipe a trace into kvsim, as in zcat FILE | kvsim ...")
    folder = Path(tempfile.mkdtemp(prefix="kvsim-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    head = sys.stdin.buffer.read(4)
    ending = next((ending for magic, ending in MAGIC.items() if head.startswith(magic)), "")
    path = folder / f"stdin.jsonl{ending}"
    try:
        with path.open("wb") as file:
            file.write(head)
            shutil.copyfileobj(sys.stdin.buffer, file)
    except OSError as error:
        raise TraceError(
            "-", None, f"cannot be copied to {folder}: {error.strerror or error}; set TMPDIR to a larger disk"
        ) from None
    return str(path)
