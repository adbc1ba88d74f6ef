"""Published traces are downloaded once and checked; here, from a server on this machine."""

import hashlib
import http.server
import io
import json
import tarfile
import threading
from functools import partial

import pytest

from kvsim.api import load_trace
from kvsim.cli import main
from kvsim.trace import published
from kvsim.trace.formats import recognise
from kvsim.trace.published import TRACES, Published
from kvsim.trace.records import read_records

CONTENT = b'{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n'


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder that is served, its address, and an empty cache."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(CONTENT)
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.fixture
def offer(server, monkeypatch):
    """Adds a trace named ``a`` with a hash to the list."""
    _, address = server

    def offer(sha256, file="a.jsonl"):
        monkeypatch.setitem(published.TRACES, "a", Published("a trace", f"{address}/{file}", "CC0", 1, sha256))

    return offer


def test_a_trace_is_downloaded_checked_and_ready(server, offer, tmp_path, capsys):
    offer(hashlib.sha256(CONTENT).hexdigest())
    assert main(["trace", "fetch", "a"]) == 0
    path = tmp_path / "cache" / "a.jsonl"
    assert path.read_bytes() == CONTENT
    said = capsys.readouterr().out
    assert "its sha256 is the expected one" in said
    assert f"kvsim replay trace.path={path}" in said
    assert recognise(str(path))[0].name == "mooncake"


def test_other_content_is_refused_and_not_kept(server, offer, tmp_path, capsys):
    offer("0" * 64)
    assert main(["trace", "fetch", "a"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("kvsim: a: http://127.0.0.1") and "is not the file that was expected" in shown
    assert shown.count("\n") == 1
    assert not [path for path in (tmp_path / "cache").glob("*") if path.is_file()]


def test_without_a_known_hash_the_first_content_is_trusted(server, offer, tmp_path, capsys):
    offer(None)
    assert main(["trace", "fetch", "a"]) == 0
    found = hashlib.sha256(CONTENT).hexdigest()
    assert f"no published checksum exists: sha256 {found} is stored in a.jsonl.sha256" in capsys.readouterr().out
    assert (tmp_path / "cache" / "a.jsonl.sha256").read_text() == f"{found}\n"
    (server[0] / "a.jsonl").write_bytes(b"something else")
    (tmp_path / "cache" / "a.jsonl").unlink()
    assert main(["trace", "fetch", "a"]) == 2
    assert "is not the file that was expected" in capsys.readouterr().err


def test_the_files_of_an_archive_are_joined(server, monkeypatch, tmp_path):
    folder, address = server
    session = {"id": "a", "block_size": 64, "requests": [{"t": 0, "in": 192, "out": 1, "hash_ids": [1, 2, 3]}]}
    with tarfile.open(folder / "HEAD.tar.gz", "w:gz") as tar:
        for number in (2, 1):
            content = json.dumps(session | {"id": str(number)}, indent=1).encode()
            member = tarfile.TarInfo(f"repository/traces/trace_{number}.json")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    url, pattern = f"{address}/HEAD.tar.gz", "*/traces/trace_*.json"
    monkeypatch.setitem(TRACES, "a", Published("", url, "CC0", None, None, members=pattern, joined="a.jsonl.zst"))
    for _ in range(2):
        assert main(["trace", "fetch", "a"]) == 0
        (folder / "HEAD.tar.gz").unlink(missing_ok=True)
    path = tmp_path / "cache" / "a.jsonl.zst"
    assert [record.fields["id"] for record in read_records(str(path))] == ["1", "2"]
    assert load_trace(path=path, page_tokens=64).requests[1].runs == ((3, 3),)
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.jsonl.zst", "a.jsonl.zst.sha256"]


def test_an_archive_without_traces_is_refused(server, monkeypatch, capsys, tmp_path):
    folder, address = server
    with tarfile.open(folder / "HEAD.tar.gz", "w:gz"):
        pass
    monkeypatch.setitem(TRACES, "a", Published("", f"{address}/HEAD.tar.gz", "CC0", None, None, members="*", joined="a.jsonl"))
    assert main(["trace", "fetch", "a"]) == 2
    assert "has no files *" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"no JSON", b'{"hash_ids": [null, 2]}', b'{"requests": [{"hash_ids": 3}]}', b"\xff"])
def test_an_archive_of_something_else_is_refused(server, monkeypatch, capsys, tmp_path, content):
    folder, address = server
    with tarfile.open(folder / "HEAD.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("trace_1.json")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    monkeypatch.setitem(TRACES, "a", Published("", f"{address}/HEAD.tar.gz", "CC0", None, None, members="*", joined="a.jsonl"))
    assert main(["trace", "fetch", "a"]) == 2
    shown = capsys.readouterr().err
    assert "HEAD.tar.gz cannot be read: " in shown and shown.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_a_missing_file_ends_with_one_line(server, offer, capsys):
    offer(None, "absent.jsonl")
    assert main(["trace", "fetch", "a"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("kvsim: a: cannot download http://127.0.0.1") and shown.count("\n") == 1


def test_the_names_are_listed(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path))
    assert main(["trace", "fetch"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in TRACES)
    assert "Apache-2.0" in shown and str(tmp_path) in shown


def test_every_entry_is_complete():
    files = [trace.file for trace in TRACES.values()]
    assert len(set(files)) == len(files)
    for trace in TRACES.values():
        assert trace.url.startswith("https://") and trace.licence
        assert trace.sha256 is None or len(trace.sha256) == 64
