"""What all tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvsim.commands.hydra_main import read_yaml_fast
from kvsim.engine.collector import freeze
from kvsim.results import progress
from tests.reused_compositions import compositions_are_reused

settings.register_profile(
    "the same examples",
    derandomize="KVSIM_NEW_SEEDS" not in os.environ,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("the same examples")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported: tests run beside each other

HAS_GPU = Path("/dev/nvidia0").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported.

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests interrupt themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not look at them again and again, nor as often."""
    gc.collect()
    freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session", autouse=True)
def _composing_is_fast() -> Iterator[None]:
    """YAML is read as in every command, and only once: composing a configuration takes most of the time of many tests."""
    with read_yaml_fast(), compositions_are_reused():
        yield


@pytest.fixture(scope="session", autouse=True)
def _stderr_is_the_tests_own() -> Iterator[None]:
    """On a busy machine, a run may take so long that it would tell how far it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "LINE_EVERY_S", 3600.0)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real traces and golden files beside the repository; absent in a user's clone."""
    if not (SHARED / "traces").is_dir():
        pytest.skip("real traces are not part of the repository: put them into ../shared/traces to run this test")
    return SHARED
