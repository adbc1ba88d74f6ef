"""Fields and columns by other names."""

import pytest

from kvsim.api import load_trace
from kvsim.errors import TraceError, UsageError
from kvsim.plans.build import build_trace
from kvsim.settings.configuration import compose
from kvsim.trace.columns import FIELDS
from kvsim.trace.formats import FORMATS

LINE = {"timestamp": 0, "in_len": 600, "output_length": 3, "hash_ids": [1, 2]}


def built(path, columns, *overrides):
    return build_trace(compose([f"trace.path={path}", f"trace.columns={columns}", *overrides]))[0]


@pytest.mark.parametrize("more", [[], ["trace=mooncake"]])
def test_a_field_by_another_name_is_read(write, more):
    source = built(write(LINE), "{input_length: in_len}", *more)
    assert [(r.prompt_tokens, r.output_tokens) for r in source.load(512).requests] == [(600, 3)]


def test_columns_of_csv_and_fields_of_objects_are_renamed(write):
    csv = write("when,prompt_tokens,answer", "2024-05-01T12:00:00Z,37,4", "2024-05-01T12:00:01Z,39,1", name="log.csv")
    lines = write(
        {"when": "2024-05-01T12:00:00Z", "usage": {"prompt_tokens": 37}, "answer": 4},
        {"when": "2024-05-01T12:00:01Z", "usage": {"prompt_tokens": 39}, "answer": 1},
    )
    for path, prompt in ((csv, "prompt_tokens"), (lines, "usage.prompt_tokens")):
        columns = {"timestamp": "when", "input_length": prompt, "output_length": "answer"}
        requests = load_trace(path=path, columns=columns, prefixes=0.0, page_tokens=16).requests
        assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in requests] == [(0.0, 37, 4), (1.0, 39, 1)]


def test_names_may_be_exchanged(write):
    line = {"timestamp": 0, "output_length": 600, "input_length": 3, "hash_ids": [1, 2]}
    (request,) = built(write(line), "{input_length: output_length, output_length: input_length}").load(512).requests
    assert (request.prompt_tokens, request.output_tokens) == (600, 3)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("{input_lenght: in_len}", r"^trace\.columns: no format has a field input_lenght; did you mean input_length\?"),
        ("{input_length: in_len, timestamp: in_len}", r"^trace\.columns: input_length and timestamp cannot both be in_len"),
    ],
)
def test_wrong_names_are_refused(write, columns, message):
    with pytest.raises(UsageError, match=message):
        built(write(LINE), columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_length": "tokens"}, "there is no field tokens; the first record has timestamp, in_len, output_length, hash_ids"),
        ({"output_length": "in_len"}, "output_length is in_len, but there is a field output_length, too"),
    ],
)
def test_names_that_do_not_fit_the_file_are_told(write, columns, message):
    with pytest.raises(TraceError, match=f":1: trace.columns: {message}"):
        load_trace(path=write(LINE), columns=columns, page_tokens=512)


def test_the_hint_of_an_unknown_format_says_how(write):
    with pytest.raises(TraceError, match=r"nearest format is mooncake.*set trace\.columns=\{input_length: in_len\}; or"):
        load_trace(path=write(LINE), page_tokens=512)


def test_every_field_by_which_a_format_is_known_can_be_given():
    assert {name for known in FORMATS for name in known.fields if "." not in name or "_ai." in name} <= FIELDS
