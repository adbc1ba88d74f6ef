"""The study of running servers: how each engine's server is told its memory, and which runs belong together."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.experiments.test_studies import study


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return study("real_servers", monkeypatch, script="serve")


@pytest.mark.parametrize(
    ("engine", "page_tokens", "pool", "words"),
    [
        ("vllm", 16, "1x", "--num-gpu-blocks-override 12000 --block-size 16"),
        ("vllm", 32, "1x", "--num-gpu-blocks-override 6000 --block-size 32"),
        (
            "vllm",
            16,
            "offload",
            "--num-gpu-blocks-override 6000 --block-size 16 --kv-offloading-size 16 --kv-offloading-backend native",
        ),
        ("sglang", 1, "0.7x", "--max-total-tokens 134400 --page-size 1"),
        ("sglang", 64, "offload", "--max-total-tokens 96000 --page-size 64 --enable-hierarchical-cache --hicache-size 17"),
    ],
)
def test_each_engine_is_told_the_same_memory_by_its_own_flags(
    engine: str, page_tokens: int, pool: str, words: str, serve: ModuleType
) -> None:
    assert serve.ENGINES[engine].flags(serve.POOLS[pool], page_tokens) == words.split()


def test_runs_are_grouped_by_engine_pool_and_workload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = study("real_servers", monkeypatch)
    for name in ("sglang/0.7x/sessions/1", "1x/sessions/2", "1x/sessions/1", "0.7x/conversations/1"):
        file = tmp_path / f"{name}.jsonl.gz"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    groups = list(run.groups(tmp_path))
    assert [group[:3] for group in groups] == [
        ("vllm", "0.7x", "conversations"),
        ("vllm", "1x", "sessions"),
        ("sglang", "0.7x", "sessions"),
    ]
    assert [[file.name[0] for file in group.files] for group in groups] == [["1"], ["1", "2"], ["1"]]
    labels = [run.Compared(*group[:3], record={}).label for group in groups]
    assert labels == ["0.7x", "1x", "SGLang, 0.7x"]
