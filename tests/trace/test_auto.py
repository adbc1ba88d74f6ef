"""A file's format is recognised, and read as if it had been named."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from kvsim.api import load_trace
from kvsim.cli import main
from kvsim.errors import TraceError, UsageError
from kvsim.plans.build import build_run, build_trace
from kvsim.settings.configuration import compose, with_trace_file
from kvsim.trace.formats import FORMATS, recognise
from tests.trace.test_lcp import ROWS, written

FIRST = {
    "mooncake": {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
    "weka": {"id": "a", "block_size": 64, "requests": [{"t": 0, "in": 128, "out": 1, "hash_ids": [1, 2]}]},
    "freeinference": {
        "week": "w", "day": "d", "session_id": "a", "user_id": "u", "harness": "h", "start_ms": 1, "end_ms": 2,
        "requests": [
            {"start_ms": 1, "end_ms": 2, "model": "m", "provider_tokens": {"completion": 1}, "role_tokens": {"user": 64},
             "block_ids": [1, 2, 3, 4], "tool_calls": []},
        ],
    },
    "lmcache": {
        "timestamp": 1.5, "request_id": "r", "model_name": "m", "chunk_size": 256, "seq_len": 512, "chunk_hashes": ["0xa", "0xb"],
    },
    "dynamo": {
        "schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 9,
        "request": {
            "request_received_ms": 1, "output_tokens": 1,
            "replay": {"trace_block_size": 64, "input_length": 64, "input_sequence_hashes": [2**64 - 1]},
        },
    },
    "tokens": {"token_ids": list(range(64)), "output_length": 1},
    "bailian": {
        "chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "type": "text", "turn": 1, "input_length": 16, "output_length": 1,
        "hash_ids": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_the_first_record_shows_the_format(name, write):
    path = write(FIRST[name])
    assert recognise(path)[0].name == name
    assert build_trace(compose([f"trace.path={path}"]))[0] == build_trace(compose([f"trace={name}", f"trace.path={path}"]))[0]


def test_a_file_that_changes_is_looked_at_again(write):
    assert [recognise(write(FIRST[name]))[0].name for name in ("tokens", "mooncake", "tokens")] == [
        "tokens",
        "mooncake",
        "tokens",
    ]


def test_settings_are_those_of_the_format(write):
    path = write({**FIRST["mooncake"], "hash_ids": [1, 2, 3, 4]})
    overrides = [f"trace.path={path}", "trace.block_tokens=256", "trace.answers=unique"]
    found, named = (build_trace(compose([*more, *overrides]))[0] for more in ([], ["trace=mooncake"]))
    assert found == named
    assert found.block_tokens == 256


def test_the_block_size_is_taken_from_the_first_record(write):
    path = write({"block_size": 64, "hash_ids": [2001, 2002], "input_length": 128})
    assert build_trace(compose([f"trace.path={path}"]))[0].block_tokens == 64
    assert build_trace(compose([f"trace.path={path}", "trace.block_tokens=32"]))[0].block_tokens == 32


def test_the_record_names_the_recognised_format(write):
    path = write(FIRST["mooncake"])
    found, named = (
        build_run(compose([*more, f"trace.path={path}"]), command="replay").config for more in ([], ["trace=mooncake"])
    )
    assert found == named


def test_a_setting_that_the_format_lacks_is_an_error(write):
    path = write(FIRST["tokens"])
    with pytest.raises(UsageError, match=r"^trace\.block_tokens has no effect on .*, a file of trace=tokens: leave it out$"):
        build_trace(compose([f"trace.path={path}", "trace.block_tokens=16"]))


def test_a_bad_value_of_a_setting_is_named(write):
    with pytest.raises(UsageError, match=r"^trace\.tail must be one of full, all, not 'half'"):
        build_trace(compose([f"trace.path={write(FIRST['mooncake'])}", "trace.tail=half"]))


def test_an_unknown_format_is_shown_with_the_nearest(write):
    path = write({"input_length": 3, "words": "hello"})
    with pytest.raises(TraceError) as caught:
        recognise(path)
    assert str(caught.value).startswith(
        f"{path}:1: unknown format: it has input_length, words. The nearest format is mooncake, which also has hash_ids"
    )


def test_without_a_near_format_all_are_listed(write):
    with pytest.raises(TraceError, match=r"unknown format: it has x\. Known are bailian \(chat_id, hash_ids\), mooncake"):
        recognise(write({"x": 1}))


@pytest.mark.parametrize(
    ("overrides", "added"),
    [
        (["trace.path=a"], True),
        (["preset=vllm", "trace.path=a"], True),
        (["trace=mooncake", "trace.path=a"], False),
        (["preset=mooncake_paper", "trace.path=a"], False),
        (["preset=vllm,mooncake_paper", "trace.path=a"], False),
        (["trace.limit=3"], False),
    ],
)
def test_a_path_alone_asks_for_recognition(overrides, added):
    assert with_trace_file(overrides) == [*(["trace=auto"] if added else []), *overrides]


def test_the_commands_need_only_the_path(write, tmp_path):
    path = write(FIRST["mooncake"])
    for number, more in enumerate(([], ["trace=auto"], ["trace=mooncake"])):
        assert main(["replay", *more, f"trace.path={path}", f"output={tmp_path / str(number)}"]) == 0
    configs = [OmegaConf.load(tmp_path / str(number) / "result.json") for number in range(3)]
    assert configs[0].config_hash == configs[1].config_hash == configs[2].config_hash
    assert configs[0].config.trace._target_ == "kvsim.trace.mooncake.Mooncake"


def test_python_needs_only_the_path(write):
    path = write(FIRST["mooncake"])
    assert load_trace(path=path).block_tokens == 512
    assert load_trace(path=path, answers="unique").requests[0].output_runs is not None


def test_a_field_by_another_name_is_pointed_out(write):
    with pytest.raises(
        TraceError, match="nearest format is mooncake, which also has input_length; in_len may be its input_length"
    ):
        recognise(write({"timestamp": 0, "hash_ids": [1], "in_len": 512, "output_length": 3}))


@pytest.mark.parametrize("name", ["free.lcp", "free.lcp.zst", "free.lcp.gz"])
def test_a_binary_file_of_another_layout_is_refused(name, write, capsys):
    path = write("\x00\x01", name=name)
    with pytest.raises(TraceError, match=r"free\.lcp.*no header of libCacheSim's binary format of prefixes.*hash_ids_rle"):
        recognise(path)
    assert main(["replay", f"trace.path={path}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


ANOTHER = [(own, name) for own in FIRST for name in (*FIRST, "openai", "tracelab")]


@pytest.mark.parametrize(("own", "name"), [pair for pair in ANOTHER if pair[0] != pair[1]])
def test_the_error_of_another_reader_names_the_one_that_fits(own: str, name: str, write: Any) -> None:
    """Unless the file has the fields by which that reader's format is known."""
    path = write(FIRST[own])
    found = [one for one in FORMATS if one.name == name]
    fits = any(set(one.fields) <= FIRST[own].keys() for one in found)
    told = ""
    with suppress(UsageError) if fits else pytest.raises(TraceError) as caught:
        load_trace(name, path=path, page_tokens=16)
    if caught is not None:
        told = str(caught.value)
        assert told.startswith(path)
    assert told.endswith(f"looks like trace={own}") != fits


def test_the_reader_that_fits_is_named_wherever_traces_are_loaded(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = f"trace.path={write(FIRST['mooncake'])}"
    convert = ["trace", "convert", file.partition("=")[2], "out.jsonl"]
    for command in (["replay", file], ["curve", file], ["trace", "info", file], convert, ["leaderboard", file]):
        assert main([*command, "trace=weka"]) == 2
        line = "requests is missing; it must be a list; this looks like trace=mooncake"
        assert line in capsys.readouterr().err, command


def test_a_binary_file_is_told_from_lines_and_an_unknown_file_has_no_hint(tmp_path: Path, write: Any) -> None:
    binary = tmp_path / "requests.lcp"
    binary.write_bytes(written(ROWS))
    with pytest.raises(TraceError, match="this looks like trace=lcp"):
        load_trace("mooncake", path=str(binary))
    for fields in ({"unknown": 1}, {}):
        with pytest.raises(TraceError) as caught:
            load_trace("mooncake", path=write(fields))
        assert "hash_ids is missing" in str(caught.value) and "looks like" not in str(caught.value)
    with pytest.raises(UsageError, match="No such file"):
        load_trace("weka", path=str(tmp_path / "absent.jsonl"))
