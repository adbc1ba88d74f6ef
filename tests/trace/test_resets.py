"""Lines that reset the cache, in traces of block hashes and of tokens."""

import json
from math import isnan
from pathlib import Path
from typing import Any

import pytest

import kvsim
from kvsim.cli import main
from kvsim.core.request import Reset
from kvsim.errors import TraceError
from kvsim.trace.base import TraceSource
from kvsim.trace.mooncake import Mooncake
from kvsim.trace.tokens import Tokens

FORMATS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "mooncake": (Mooncake, {"input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}),
    "tokens": (Tokens, {"token_ids": [1, 2, 3, 4], "output_length": 1}),
}


@pytest.fixture(params=list(FORMATS))
def source_of(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Make a trace of these lines; a number is a request with that timestamp."""
    kind, prompt = FORMATS[request.param]

    def make(*lines: int | dict[str, Any], **settings: Any) -> TraceSource:
        path = tmp_path / "trace.jsonl"
        written = [prompt | {"timestamp": line} if isinstance(line, int) else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in written))
        source: TraceSource = kind(path=str(path), **settings)
        return source

    return make


def test_a_reset_belongs_to_the_request_after_it(source_of: Any) -> None:
    source = source_of(
        1000, {"reset": "drain"}, 3000, {"reset": "now", "timestamp": 4000}, {"reset": "drain", "timestamp": 5000}, 5000
    )
    first, second, third = source.load(512).requests
    assert first.resets == ()
    assert len(second.resets) == 1 and second.resets[0].mode == "drain" and isnan(second.resets[0].at_s)
    assert third.resets == (Reset("now", 3.0), Reset("drain", 4.0))


def test_times_of_resets_are_scaled_like_arrivals(source_of: Any) -> None:
    source = source_of(1000, {"reset": "drain", "timestamp": 2000}, 3000, rate=2.0)
    assert source.load(512).requests[1].resets == (Reset("drain", 0.5),)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"reset": "later"}, 'reset must be drain or now, not "later"'),
        ({"reset": None}, "reset must be drain or now, not null"),
        ({"reset": ["drain"]}, r'reset must be drain or now, not \["drain"\]'),
        ({"reset": "drain", "timestamp": -1}, "timestamp must be 0 or more, not -1"),
        ({"reset": "drain", "timestamp": "x"}, 'timestamp must be a number of at least 0, not "x"'),
        ({"reset": "drain", "timestamp": 500}, "timestamps must not decrease: 500 ms after 1000 ms; sort the file"),
        ({"reset": "drain", "hash_ids": []}, "a line with reset may also have a timestamp, but not hash_ids: put that on a line"),
    ],
)
def test_a_bad_reset_names_its_line(source_of: Any, line: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match=rf"trace\.jsonl:2: {problem}"):
        source_of(1000, line, 3000).load(512)


def test_a_reset_without_a_request_on_either_side_has_no_effect_and_says_so(source_of: Any) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl:1: reset before the first request has no effect"):
        source_of({"reset": "drain"}, 1000).load(512)
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: reset after the last request has no effect"):
        source_of(1000, {"reset": "drain"}).load(512)


def test_a_limit_may_end_with_a_reset(source_of: Any) -> None:
    requests = source_of(1000, {"reset": "drain"}, 3000, limit=2).load(512).requests
    assert len(requests) == 1 and not requests[0].resets


def test_turns_are_found_across_a_reset(tmp_path: Path) -> None:
    lines = [
        {"token_ids": [1, 2], "output_length": 1, "session_id": "a"},
        {"reset": "drain"},
        {"token_ids": [3], "output_length": 1, "session_id": "b"},
        {"token_ids": [1, 2, 4], "output_length": 1, "session_id": "a", "delay": 100},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = Tokens(path=str(path))
    assert [request.after for request in source.load(1).requests] == [-1, -1, 0]
    assert source.page_names(1)[0] == "1"
    assert len(source.page_keys(1)(0)) == 16


def test_the_same_prompt_after_a_reset_is_no_hit(source_of: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = source_of(0, 1000, {"reset": "drain"}, 2000, 3000)
    name = "tokens" if isinstance(source, Tokens) else "mooncake"
    pages = 1 if name == "tokens" else 512
    for command in (kvsim.replay, kvsim.simulate):
        trace = kvsim.load_trace(name, path=source.path, page_tokens=pages)  # type: ignore[attr-defined]
        usable = (trace.requests[0].prompt_tokens - 1) // pages
        assert command(trace, "tiers.gpu.capacity=20pages").hit_pages[:, 0].tolist() == [0, usable, 0, usable]
    assert main(["trace", "info", source.path, f"page_tokens={pages}"]) == 0  # type: ignore[attr-defined]
    assert "Resets of the cache: 1." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("given", ["600", "[600,x]", "[-1]", "[nan]"])
def test_bad_times_of_resets_end_with_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"engine.reset_at_s={given}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvsim: engine.reset_at_s") and error.count("\n") == 1
