"""Lines of JSON, and what is wrong with them."""

import gzip
import os

import pytest
import zstandard

from kvsim.errors import TraceError
from kvsim.trace.records import Record, extents_of, read_records


def read(path, limit=None):
    return [record.fields for record in read_records(path, limit)]


def test_plain_and_gzipped_files_read_alike(write):
    assert read(write({"a": 1}, {"a": 2})) == read(write({"a": 1}, {"a": 2}, name="trace.jsonl.gz")) == [{"a": 1}, {"a": 2}]


def test_empty_lines_are_skipped_but_counted(write):
    assert [record.line for record in read_records(write("", {"a": 1}, "  ", {"a": 2}))] == [2, 4]


def problem(path):
    with pytest.raises(TraceError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(path)
    assert "\n" not in message
    return message.removeprefix(path)


def test_a_line_that_is_no_json_is_named(write):
    assert problem(write({"a": 1}, '{"a": ')).startswith(":2: not JSON: Expecting value")


def test_a_file_of_another_kind_is_told_what_a_csv_file_begins_with(write):
    assert problem(write("id;input_len;output_len", "1;2;3")) == (
        ":1: not JSON: Expecting value; a line is a JSON object, or the first one has the names of a CSV file's columns, with "
        "commas between them"
    )
    assert problem(write({"a": 1}, "id;input_len")) == ":2: not JSON: Expecting value"


def test_a_line_that_is_no_object_is_named(write):
    assert problem(write({"a": 1}, [1, 2])) == ":2: expected a JSON object, not [1, 2]"


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.json.zst"])
def test_a_file_may_be_one_array(write, name):
    assert read(write("[", '{"a": 1},', '{"a":', "2}]", name=name)) == [{"a": 1}, {"a": 2}]
    assert read(write('[{"a": 1}, {"a": 2}]', name=name), limit=1) == [{"a": 1}]


def test_a_file_may_be_one_object(write):
    assert read(write("{", '  "a": [1,', "  2]", "}")) == [{"a": [1, 2]}]
    assert problem(write("{", '  "a": [1,')).startswith(":1: not JSON: Expecting property name")


def test_a_cell_of_csv_may_be_a_list(write):
    path = write("hash_ids,other", '"[3, 4, 9]",x', "[7],x", '"[7",x', "7,x", name="t.csv")
    one, other, *wrong = read_records(path)
    assert one.id_extents("hash_ids") == ((3, 2), (9, 1)) and other.integers("hash_ids") == [7]
    for row in wrong:
        with pytest.raises(TraceError, match="hash_ids must be a list, not"):
            row.integers("hash_ids")
    with pytest.raises(TraceError, match='other must be a list, not "x"'):
        one.items("other")


def test_rows_of_csv_have_the_names_of_their_columns(write):
    path = write("a b,c,d", "1,x y,", "2.5,2023-11-16 18:15:46,-3", name="t.csv.gz")
    assert read(path) == [{"a b": "1", "c": "x y", "d": None}, {"a b": "2.5", "c": "2023-11-16 18:15:46", "d": "-3"}]
    assert problem(write("a,b", "1,2,3", name="t.csv")) == ":2: has 3 cells, but there are 2 columns"


def test_a_byte_order_mark_is_no_content(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    assert read(str(path)) == [{"a": 1}]


def test_a_bad_element_of_an_array_is_named(write):
    assert problem(write('[{"a": 1}, 2]')) == ", element 2: expected a JSON object, not 2"
    assert problem(write('[{"a": 1},')) == ", element 2: expected a JSON object, not the end of the file"
    assert problem(write('[{"a": 1}, [')) == ", element 2: expected a JSON object, not ["
    assert problem(write('[{"a": 1}, {"b": "]}')) == ", element 2: the file ends inside it; an array must end with ]"
    assert problem(write('[{"a": 1} {"b": 2}]')) == ', element 1: expected , or ] behind it, not {"b":'
    assert problem(write('[{"a": 1}', "")) == ", element 1: expected , or ] behind it, not the end of the file"
    assert problem(write('[{"a": 1}, {"b" 2}]')).startswith(", element 2: not JSON: Expecting ':' delimiter")
    assert problem(write("[ ]")) == ": the file is empty: it contains no requests"
    assert problem(write('[{"a": 1}]', '{"b": 2}')) == ', element 1: expected nothing behind the end of the array, not {"b":'


@pytest.mark.parametrize("number", [2**63, 2**64, 2**128 - 1])
def test_ids_may_be_large(write, number):
    assert read(write({"a": [number]})) == [{"a": [number]}]


def test_a_missing_file_is_named(tmp_path):
    assert problem(str(tmp_path / "absent.jsonl")) == ": cannot be read: No such file or directory"


def test_a_folder_is_no_trace(tmp_path):
    assert problem(str(tmp_path)) == ": cannot be read: Is a directory"


def test_an_empty_file_holds_no_request(write):
    assert problem(write()) == problem(write("", "")) == ": the file is empty: it contains no requests"
    assert problem(write(name="trace.jsonl.gz")) == ": the file is empty: it contains no requests"


def test_a_truncated_gzip_file_is_named(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"a": "%s"}\n' % os.urandom(20).hex().encode() for _ in range(1000)))
    path.write_bytes(whole[: len(whole) // 2])
    assert "the gzip file is truncated or damaged here" in problem(str(path))


def test_a_file_may_be_compressed_with_zstandard(write):
    assert read(write({"a": 1}, {"a": 2}, name="trace.jsonl.zst")) == [{"a": 1}, {"a": 2}]


def test_zstandard_frames_follow_each_other(tmp_path):
    path = tmp_path / "trace.jsonl.zst"
    path.write_bytes(b"".join(zstandard.compress(b'{"a": %d}\n' % number) for number in range(3)))
    assert read(str(path)) == [{"a": 0}, {"a": 1}, {"a": 2}]


def test_a_name_that_promises_zstandard_is_held_to_it(tmp_path):
    path = tmp_path / "trace.jsonl.zst"
    path.write_text("{}\n")
    assert problem(str(path)).startswith(": the Zstandard file is not valid, although its name ends in .zst")


def test_a_name_that_promises_gzip_is_held_to_it(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_text("{}\n")
    assert problem(str(path)).startswith(": not a valid gzip file, although its name ends in .gz")


def test_a_gzipped_file_with_a_plain_name_is_explained(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(gzip.compress(b"{}\n"))
    assert problem(str(path)) == ":1: not UTF-8 text; if the file is compressed, its name must end in .gz or .zst"


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("integer", -1, "x must be 0 or more, not -1"),
        ("integer", 1.0, "x must be a whole number of at least 0, not 1.0"),
        ("number", float("nan"), "x must be a finite number of at least 0, not NaN"),
        ("number", 10**400, "x must be from 0 to 1e+12, not 10**400 or more"),
        ("number", "1", 'x must be a number of at least 0, not "1"'),
        ("name", [], "x must be a string or an integer, not []"),
        ("integers", [1, "2"], 'x must be a list of non-negative integers, not [1, "2"]'),
        ("integers", [1, -2], "x must be a list of non-negative integers, not [1, -2]"),
        ("integers", 7, "x must be a list, not 7"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_named_and_shown(method, value, expected):
    with pytest.raises(TraceError) as caught:
        getattr(Record("f", 3, {"x": value}), method)("x")
    assert str(caught.value) == f"f:3: {expected}"


@pytest.mark.parametrize("method", ["integer", "number", "name", "items", "integers"])
def test_a_missing_field_is_named(method):
    with pytest.raises(TraceError, match="f:3: x is missing; it must be"):
        getattr(Record("f", 3, {}), method)("x")


def test_ids_become_normalised_extents():
    assert extents_of([]) == ()
    assert extents_of([4]) == ((4, 1),)
    assert extents_of([4, 5, 6, 9, 10, 3, 3]) == ((4, 3), (9, 2), (3, 1), (3, 1))
