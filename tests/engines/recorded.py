"""What lies beside the repository, not in it: hits that engines recorded, and further models of them."""

import gzip
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def reference(shared: Path, name: str) -> ModuleType:
    """A model of an engine that lies beside the repository; skips the test where it is absent."""
    path = shared / "reference" / f"{name}.py"
    if not path.is_file():
        pytest.skip(f"compares with a reference model that is not part of the repository: ../shared/reference/{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def golden_rows(shared: Path, name: str, requests: int) -> list[tuple[int, ...]]:
    """The hits that an engine recorded of the first requests, tier by tier; skips the test where they are absent."""
    path = shared / "golden" / f"{name}.txt.gz"
    if not path.is_file():
        pytest.skip(f"compares with recorded hits that are not part of the repository: ../shared/golden/{name}.txt.gz")
    with gzip.open(path, "rt") as file:
        rows = [tuple(map(int, line.split())) for line in file if line[0].isdigit()]
    return [row[2:4] for row in rows[:requests]]


def golden_rows_of(shared: Path, name: str, requests: int) -> list[tuple[int, ...]]:
    """The same of SGLang's radix and unified caches, always as hits on GPU, host and storage."""
    path = shared / "golden" / f"{name}.txt.gz"
    if not path.is_file():
        pytest.skip(f"compares with recorded hits that are not part of the repository: ../shared/golden/{name}.txt.gz")
    with gzip.open(path, "rt") as file:
        rows = [tuple(map(int, line.split())) for line in file if line[0].isdigit()]
    return [(*row[2:], 0, 0)[:3] for row in rows[:requests]]
