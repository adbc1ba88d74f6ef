"""Keys of pages that outlive a process: equal in every process, and for nothing but equal pages."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvsim.errors import TraceError
from kvsim.trace.bailian import Bailian
from kvsim.trace.base import TraceSource
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.synthetic import Synthetic
from kvsim.trace.tokens import Tokens
from kvsim.trace.weka import Weka
from kvsim.trace.words import Words
from tests.workloads import pages_of

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = ([5, 6, 7], [5, 6, 9, 4], [7, 5], [5, 6, 7, 8])


def lines(source: type[TraceSource]) -> list[dict[str, Any]]:
    """Four prompts of blocks of four tokens."""
    if source is Tokens:
        texts = [[block * 10 + at for block in blocks for at in range(4)] for blocks in BLOCKS]
        return [{"timestamp": 1000 * at, "token_ids": text, "output_length": 1} for at, text in enumerate(texts)]
    sizes = [{"input_length": 4 * len(blocks), "output_length": 1, "hash_ids": blocks} for blocks in BLOCKS]
    if source is Mooncake:
        return [{"timestamp": 1000 * at, **size} for at, size in enumerate(sizes)]
    if source is Bailian:
        about = {"parent_chat_id": -1, "type": "text", "turn": 1}
        return [{"chat_id": at, "timestamp": 4 - at, **about, **size} for at, size in enumerate(sizes)]
    calls = [{"t": at, "in": 4 * len(blocks), "out": 1, "hash_ids": blocks} for at, blocks in enumerate(BLOCKS)]
    return [{"id": "a", "block_size": 4, "requests": calls[:3]}, {"id": "b", "block_size": 4, "requests": calls[3:]}]


def source_of(kind: type[TraceSource], folder: Path, name: str = "trace.jsonl", **settings: Any) -> TraceSource:
    """A small trace of this kind, in a file if it is read from one."""
    if kind is Synthetic:
        return Synthetic(**{"sessions": 6, **settings})
    if kind is Words:
        return Words(prompts=["a b c d e f g h", "a b c d x y z q"], **settings)
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(kind)))
    sizes = {} if kind is Tokens else {"block_tokens": 4}
    return kind(path=str(path), **sizes, **settings)


def keyed(source: TraceSource, page_tokens: int) -> list[list[bytes]]:
    """The keys of each request's pages, in the order of their arrival."""
    key = source.page_keys(page_tokens)
    requests = source.load(page_tokens).requests
    return [[key(page) for page in pages_of(request.runs)] for request in requests]


KINDS = [Mooncake, Bailian, Weka, Tokens, Synthetic, Words]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_tokens", [2, 4, 8])
def test_neither_the_rate_nor_where_a_trace_ends_changes_a_key(kind: Any, page_tokens: int, tmp_path: Path) -> None:
    whole = keyed(source_of(kind, tmp_path), page_tokens)
    part = keyed(source_of(kind, tmp_path, rate=3.0, limit=2), page_tokens)
    assert len(part) == 2 <= len(whole) and all(prompt in whole for prompt in part)
    assert all(len(key) == 16 for prompt in whole for key in prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_have_equal_keys_exactly_as_far_as_they_share_pages(kind: Any, tmp_path: Path) -> None:
    source = source_of(kind, tmp_path)
    requests, keys = source.load(4).requests, keyed(source, 4)
    ids = [pages_of(request.runs) for request in requests]
    flat = {(page, key) for some, named in zip(ids, keys, strict=True) for page, key in zip(some, named, strict=True)}
    assert len(flat) == len({page for page, _ in flat}) == len({key for _, key in flat}) > 2


def test_every_process_gives_the_same_keys(tmp_path: Path) -> None:
    sources = [source_of(kind, tmp_path, f"{kind.__name__}.jsonl") for kind in KINDS]
    code = (
        "from kvsim.trace.bailian import Bailian; from kvsim.trace.mooncake import Mooncake; from kvsim.trace.weka import Weka\n"
        "from kvsim.trace.synthetic import *; from kvsim.trace.tokens import Tokens; from kvsim.trace.words import Words\n"
        "from tests.trace.test_page_keys import keyed\n"
        f"print([keyed(source, 4) for source in {sources!r}])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    text = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    assert text == f"{[keyed(source, 4) for source in sources]}\n"


def flat_keys(source: TraceSource, page_tokens: int = 4) -> set[bytes]:
    return {key for prompt in keyed(source, page_tokens) for key in prompt}


def test_block_ids_of_two_files_name_different_pages(tmp_path: Path) -> None:
    one = source_of(Mooncake, tmp_path, "one.jsonl")
    other = source_of(Mooncake, tmp_path, "other.jsonl")
    assert keyed(one, 4) == keyed(other, 4), "a copy of the file"
    with open(tmp_path / "other.jsonl", "a") as file:
        file.write(json.dumps({**lines(Mooncake)[0], "timestamp": 9000}) + "\n")
    assert not flat_keys(one) & flat_keys(other)
    assert not flat_keys(one) & flat_keys(one, 2)
    assert not flat_keys(Synthetic(sessions=3)) & flat_keys(Synthetic(sessions=3, seed=1))


def test_tokens_name_the_same_pages_in_any_file(tmp_path: Path) -> None:
    one, other = (source_of(Tokens, tmp_path, name) for name in ("one.jsonl", "other.jsonl"))
    backwards = [{**line, "timestamp": 0} for line in reversed(lines(Tokens))]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(line) + "\n" for line in backwards))
    assert keyed(one, 4) == keyed(other, 4)[::-1]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    for kind in (Mooncake, Tokens):
        source = source_of(kind, tmp_path)
        os.remove(tmp_path / "trace.jsonl")
        with pytest.raises(TraceError, match=r"trace.jsonl: cannot be read: No such file or directory"):
            source.page_keys(4)
