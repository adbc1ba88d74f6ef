"""Small trace files."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes lines (text as it is, anything else as JSON) to a file, gzipped if its name says so; returns its path."""

    def write(*lines: object, name: str = "trace.jsonl") -> str:
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
        return str(path)

    return write
