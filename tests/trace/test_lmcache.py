"""LMCache's log of look-ups."""

import pytest

from kvsim.api import load_trace
from kvsim.errors import TraceError
from kvsim.trace.lmcache import LMCache


def line(tokens, hashes, timestamp=1711929600.0, **more):
    return {
        "timestamp": timestamp, "request_id": f"req-{timestamp}-{hashes}", "model_name": "m", "chunk_size": 4, "seq_len": tokens,
        "dtypes": ["bfloat16"], "shapes": [[32, 4, 8]], "chunk_hashes": [f"{number:#x}" for number in hashes], **more,
    }  # fmt: skip


def load(write, *lines, page_tokens=4, **settings):
    return LMCache(path=write(*lines), block_tokens=4, **settings).load(page_tokens).requests


def test_a_line_is_a_request(write):
    requests = load(write, line(10, [1 << 250, 7], 1002.5), line(8, [1 << 250, 9], 1000.0), output_tokens=30)
    assert [(r.index, r.arrival_s, r.prompt_tokens, r.output_tokens, r.runs, r.kind) for r in requests] == [
        (0, 0.0, 8, 30, ((0, 1), (2, 1)), "m"),
        (1, 2.5, 10, 30, ((0, 2),), "m"),
    ]


def test_models_share_no_pages(write):
    requests = load(write, line(4, [1]), line(4, [1], request_id="n", model_name="n"), line(4, [1], request_id="x"))
    assert [request.runs for request in requests] == [((0, 1),), ((1, 1),), ((0, 1),)]


def test_a_request_that_is_looked_up_again_counts_once(write):
    lines = line(4, [1], request_id="a"), line(4, [1], request_id="a"), line(4, [1], request_id=""), line(4, [1], request_id="")
    assert len(load(write, *lines)) == 3
    assert len(load(write, *lines, limit=2)) == 2


def test_the_chunk_size_is_taken_from_the_file(write):
    assert load_trace(path=write(line(8, [1, 2])), page_tokens=4).block_tokens == 4


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(4, [1], chunk_hashes=["1", "zz"]), "chunk_hashes must be a list of hexadecimal texts, such as 0x1f"),
        (line(4, [1], chunk_hashes=["0x1_0"]), "chunk_hashes must be a list of hexadecimal texts"),
        (line(4, [1], chunk_hashes=["0x\uff11"]), "chunk_hashes must be a list of hexadecimal texts"),
        (line(4, [1], chunk_hashes=[" 0x1"]), "chunk_hashes must be a list of hexadecimal texts"),
        (line(4, [1], chunk_hashes=[1]), "chunk_hashes must be a list of hexadecimal texts"),
        (line(4, [1], chunk_size=256), "chunk_size is 256, but block_tokens is 4: set trace.block_tokens=256"),
        (line(9, [1]), "chunk_hashes has 1 ids, but seq_len=9 takes 3 blocks of 4 tokens"),
        (line(4, [1], timestamp="now"), 'timestamp must be a number of at least 0, not "now"'),
    ],
)
def test_a_bad_line_is_named(write, bad, message):
    path = write(line(4, [0], request_id="first"), bad)
    with pytest.raises(TraceError) as caught:
        LMCache(path=path, block_tokens=4).load(4)
    assert str(caught.value).startswith(f"{path}:2: {message}")
