"""Small trace files."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes lines (text as it is, anything else as JSON) to a file, compressed as its name says; returns its path."""

    def write(*lines: object, name: str = "trace.jsonl") -> str:
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines).encode()
        path = tmp_path / name
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(text))
        return str(path)

    return write
