"""What all tests share."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real traces and golden files beside the repository; absent in a user's clone."""
    if not (SHARED / "traces").is_dir():
        pytest.skip("real traces are not part of the repository: put them into ../shared/traces to run this test")
    return SHARED
