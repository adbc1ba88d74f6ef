"""Whatever a file of results contains: runs of the trace's requests, or one line that names the file."""

from pathlib import Path

import pytest
from hypothesis import given

from kvsim.servers.results.formats import facts_of, read_file
from kvsim.servers.simulated import overrides_of
from tests.mutations import as_lines, bomb, few, gzipped, json_lines, packed, refusal
from tests.servers.hostile import FILES, SAVED
from tests.servers.shapes import shape
from tests.servers.test_result_files import requests


def is_read(path: Path, content: bytes) -> bool:
    """Whether a file is read as runs of the trace's requests."""
    path.write_bytes(content)

    def read() -> None:
        facts = facts_of(path)
        for run in read_file(path, requests()):
            assert len(run.errors) == len(run.sent_s) == len(run.token_gaps_s) == 3
            assert all(len(tokens) == 3 for tokens in (run.cached_tokens, run.prompt_tokens, *run.tier_tokens.values()))
        if facts is not None:
            refusal(lambda: overrides_of(facts, (), shape), "")

    return not refusal(read, f"{path}")


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_of_a_client_is_read_or_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"

    @few()
    @given(json_lines(FILES[name]))
    def run(content: bytes) -> None:
        is_read(path, content)

    run()
    assert is_read(path, as_lines(FILES[name]))


def test_a_changed_run_that_was_saved_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl.gz"

    @few()
    @given(gzipped(json_lines(SAVED), as_lines(SAVED)))
    def run(content: bytes) -> None:
        is_read(path, content)

    run()
    assert is_read(path, packed(as_lines(SAVED)))


@pytest.mark.parametrize(("begins", "repeated"), [(b"", b"\x00"), (as_lines(SAVED[:1]), b"[" * 64)], ids=["head", "request"])
def test_a_run_that_unpacks_to_more_than_memory_is_refused(begins: bytes, repeated: bytes, tmp_path: Path) -> None:
    assert not is_read(tmp_path / "1.jsonl.gz", bomb(begins, repeated))


@pytest.mark.parametrize("tokens", [2**63, 2**40 + 1, -1])
@pytest.mark.parametrize("name", ["prompt_tokens", "output_tokens", "cached_tokens"])
def test_counts_of_a_saved_run_are_bounded(name: str, tokens: int, tmp_path: Path) -> None:
    """Sums of them would not fit into 64 bits."""
    head, first, *others = SAVED
    assert not is_read(tmp_path / "1.jsonl.gz", packed(as_lines([head, first | {name: tokens}, *others])))
