"""``kvsim shadow``: from the words to the page, the metrics and the recording."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvsim.cli import main
from kvsim.commands.shadow import expanded
from kvsim.kv_events.dialects import DIALECTS, encode
from kvsim.kv_events.recorded import Message, write_recorded
from tests.reused_compositions import compositions_are_reused
from tests.servers.emulated import emulated
from tests.shadow.written import batch, stored
from tests.waiting import LONG_S, join, wait_until

SMALL = ("model=tiny", "tiers.gpu.capacity=35pages", "shadow.follow=false")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def compositions() -> Iterator[None]:
    with compositions_are_reused():
        yield


@pytest.fixture
def log(folder: Path) -> Path:
    """Six documents of 10 pages, round and round: too many for 35 pages, few enough for 70."""
    lines = [
        {"timestamp": 100 * number, "token_ids": [1000 * (number % 6) + at for at in range(161)], "output_length": 1}
        for number in range(30)
    ]
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*words: str) -> int:
    return main(["shadow", *words])


def test_the_first_table_says_what_other_caches_would_gain(log: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ghosts = 'shadow.ghosts={twice: "tiers.gpu.capacity=2x", cpu: "tiers.cpu.capacity=20pages", mru: "eviction=mru"}'
    assert run(f"log={log}", *SMALL, ghosts, "output=out", "record=trace.jsonl") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = {row[0]: row[1:] for row in rows if row and row[0] in ("as_configured", "twice", "cpu", "mru")}
    assert table["as_configured"][:2] == ["0.00%", "0.00%"]
    assert table["twice"][:2] == ["+79.5", "79.50%"] and table["twice"][-1] == "tiers.gpu.capacity=1120tokens"
    assert float(table["mru"][0]) > 20 and table["mru"][-1] == "eviction=mru" and "tiers.cpu.capacity=20pages" in table["cpu"]
    page = (folder / "out" / "shadow.html").read_text()
    assert "<b>+79.5 points</b>twice: tiers.gpu.capacity=1120tokens" in page and 'http-equiv="refresh"' not in page

    assert main(["replay", "trace.path=trace.jsonl", "model=tiny", "tiers.gpu.capacity=70pages", "output=replayed"]) == 0
    result = json.loads((folder / "replayed" / "result.json").read_text())
    assert result["hit_rate"] == pytest.approx(0.7950, abs=1e-4) and result["requests"] == 30


def test_twice_each_tier_is_the_default(log: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"log={log}", *SMALL, "tiers.cpu.capacity=10pages", "output=out") == 0
    out = capsys.readouterr().out
    assert "gpu_2x" in out and "tiers.gpu.capacity=1120tokens" in out and "tiers.cpu.capacity=320tokens" in out


def test_it_stops_after_enough_requests(log: Path, folder: Path) -> None:
    assert run(f"log={log}", "model=tiny", "shadow.requests=7", "record=trace.jsonl", "output=out") == 0
    assert (folder / "trace.jsonl").read_text().count("\n") == 7


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "events, log or listen is missing: set events=tcp://HOST:PORT, log=FILE, or listen=PORT server=URL"),
        (["listen=9000"], "listen=PORT and server=URL belong together"),
        (["server=http://localhost:8000"], "listen=PORT and server=URL belong together"),
        (["listen=9000", "server=nowhere"], "shadow.server must be an address such as http://localhost:8000, not 'nowhere'"),
        (["listen=9000", "server=http://localhost:1", "log=x"], "log and listen exclude each other"),
        (["listen=70000", "server=http://localhost:1"], "shadow.listen must be from 0 to 65535, not 70000"),
        (["log=missing.jsonl"], "log: missing.jsonl: No such file or directory"),
        (["listen=0", "server=http://localhost:1", "events=missing.gz"], "missing.gz: No such file or directory"),
        (["log=log.jsonl", "shadow.patience_s=1"], "shadow.patience_s has no effect without listen: leave it out"),
        (["log=log.jsonl", "shadow.host=0.0.0.0"], "shadow.host has no effect without listen or metrics_port: leave it out"),
        (["log=log.jsonl", "shadow.ranks=2"], "shadow.ranks has no effect without events: leave it out"),
        (["events=missing.gz", "shadow.ranks=2"], "shadow.ranks has no effect on recorded events: leave it out"),
        (["events=missing.gz", "shadow.topic=kv"], "shadow.topic has no effect on recorded events: leave it out"),
        (
            ["events=missing.gz", "shadow.replay=[tcp://localhost:3]"],
            "shadow.replay has no effect on recorded events: leave it out",
        ),
        (
            ["events=tcp://localhost:1,missing.gz", "shadow.replay=['','tcp://localhost:3']"],
            "replay has no effect on the recorded events missing.gz: leave its place empty",
        ),
        (["listen=9000", "server=http://me:secret@localhost:1"], "shadow.server has a user or password"),
        (
            ["events=missing.gz", "record=trace.jsonl", "shadow.salt_file=salt"],
            "missing.gz: No such file or directory",
        ),
        (["log=log.jsonl.gz"], "log: log.jsonl.gz is compressed and does not grow"),
        (["log=log.jsonl", "record=trace.jsonl.gz"], "record must not end in .gz or .zst"),
        (["log=log.jsonl", "shadow.salt_file=salt"], "salt_file has no effect without record"),
        (["events=tcp://localhost:1", "shadow.follow=false"], "follow=false has no effect on what arrives over the network"),
        (["events=tcp://localhost:1", "shadow.tokenizer=model"], "tokenizer has no effect on events"),
        (
            ["events=tcp://localhost:1,tcp://localhost:2", "shadow.replay=[tcp://localhost:3]"],
            "replay must name an address for each",
        ),
        (["log=log.jsonl", "shadow.tokenizer=model"], "shadow.tokenizer: model/tokenizer.json does not exist"),
        (["log=log.jsonl", "engine.max_running_requests=2"], "engine.max_running_requests has no effect on kvsim shadow"),
        (["log=log.jsonl", "trace=mooncake"], "trace has no effect on kvsim shadow"),
        (["log=log.jsonl", "-m"], "-m: kvsim shadow takes a single configuration"),
        (["log=log.jsonl", "shadow.ghosts={a: b}"], "shadow.ghosts.a must be overrides, KEY=VALUE"),
        (["log=log.jsonl", "shadow.ghosts=[1]"], "shadow.ghosts must be overrides by name"),
        (
            ["log=log.jsonl", "shadow.ghosts={a: 'eviction=nothing'}"],
            "shadow.ghosts.a: eviction=nothing: there is no such choice",
        ),
        (["log=log.jsonl", "shadow.ghosts={a: 'shadow.memory=1GiB'}"], "shadow.memory is a setting of all ghosts together"),
        (["log=log.jsonl", "shadow.ghosts={a: 'tiers.cpu.capacity=2x'}"], "the engine's tier cpu does not exist: give a size"),
        (["log=log.jsonl", "shadow.ghosts={as_configured: 'eviction=arc'}"], "is the name of the engine's own settings"),
        (["log=log.jsonl", "shadow.memory=much"], "shadow.memory"),
        (["log=log.jsonl", "shadow.every_s=0"], "shadow.every_s must be"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused_in_one_line(
    words: list[str], problem: str, log: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.rglob("*"))
    assert run(*words, *(["output=out"] if "-m" not in words else [])) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1 and error.startswith("kvsim: ") and "secret" not in error
    assert [path for path in sorted(folder.rglob("*")) if path not in before and path.is_file() and "lock" not in path.name] == []


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("log=a b", "shadow.log='a b'"),
        ("listen=9000", "shadow.listen=9000"),
        ("server=http://a:1", "shadow.server='http://a:1'"),
        ("events=tcp://a:1,tcp://b:2", "shadow.events=['tcp://a:1','tcp://b:2']"),
        ("shadow.events=tcp://a:1", "shadow.events=['tcp://a:1']"),
        ("events=[a]", "shadow.events=[a]"),
        ("page=null", "shadow.page=null"),
        ("tiers.gpu.capacity=1", "tiers.gpu.capacity=1"),
    ],
)
def test_short_words_stand_for_settings(word: str, read: str) -> None:
    assert expanded(word) == read


def test_lines_that_cannot_be_read_are_counted_and_quoted_nowhere(
    log: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(log.read_text() + '{"token_ids": "my secret", "output_length": 1}\nnot JSON: my secret\n')
    assert run(f"log={log}", *SMALL, "output=out") == 0
    out, err = capsys.readouterr()
    assert err == f"kvsim: {log}:31: token_ids must be a list; left out\n"
    assert "2 times, first: " in out and "secret" not in out + (folder / "out" / "shadow.html").read_text()


def test_requests_come_from_the_log_alone_where_events_are_beside_it(
    log: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = encode(batch(1.0, stored("abcd")), DIALECTS["vllm"])
    write_recorded(folder / "events.gz", [Message(1.0, 0, 0, b"", payload)])
    assert run(f"log={log}", "events=events.gz", *SMALL, "output=out", "record=trace.jsonl") == 0
    assert (folder / "trace.jsonl").read_text().count("\n") == 30
    out = capsys.readouterr().out
    assert "Engines, by their events" in out and "events.gz" in out

    assert run("events=events.gz", *SMALL, "page_tokens=4", "output=out", "record=other.jsonl") == 0
    assert (folder / "other.jsonl").read_text().count("\n") == 1


def test_a_full_disk_stops_the_recording_only(log: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    assert run(f"log={log}", *SMALL, "output=out", "record=/dev/full") == 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == 2 and lines[0].startswith(
        "kvsim: shadow.record: cannot write /dev/full: No space left on device; requests"
    )
    assert lines[1].startswith("kvsim: shadow.record: 30 requests are missing from /dev/full") and "as_configured" in out


def test_a_recording_goes_on_with_its_salt(log: Path, folder: Path) -> None:
    for _ in range(2):
        words = (f"log={log}", *SMALL, "output=out", "record=trace.jsonl", "shadow.salt_file=salt")
        assert run(*words) == 0
    lines = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert len(lines) == 60 and lines[0]["hash_ids"] == lines[30]["hash_ids"]


class Process:
    """``kvsim shadow`` in a process of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvsim", "shadow", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []

    def wait_for(self, beginning: str) -> str:
        """Return the rest of the line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        raise AssertionError((self.lines, self._process.stderr and self._process.stderr.read()))

    def end(self, number: signal.Signals) -> tuple[int, str, str]:
        """Send a signal; returns the exit code and what was still printed."""
        self._process.send_signal(number)
        out, err = self._process.communicate(timeout=LONG_S)
        return self._process.returncode, out, err


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 0, ""),
        pytest.param(signal.SIGINT, 130, "kvsim: interrupted\n", marks=pytest.mark.long),  # a process that starts, as above
    ],
)
def test_a_signal_in_the_middle_loses_nothing_that_was_answered(
    number: signal.Signals, code: int, said: str, folder: Path
) -> None:
    """Ten clients ask as fast as they can; whatever was answered when it ends is in the recording."""
    answered: list[int] = []

    def ask(url: str, client: int) -> None:
        with httpx.Client(timeout=LONG_S) as http:
            for turn in range(1000):
                body: dict[str, Any] = {"prompt": [client, turn, *range(40)], "max_tokens": 2}
                try:
                    answer = http.post(f"{url}/v1/completions", json=body)
                except httpx.TransportError:
                    return
                assert answer.status_code == 200
                answered.append(1)

    with emulated(["model=tiny", "tiers.gpu.capacity=1000pages"], speed=1000.0) as server:
        process = Process(
            folder, "listen=0", f"server={server.url}", "model=tiny", "record=trace.jsonl", "output=out", "shadow.metrics_port=0",
            "shadow.every_s=0.2",
        )  # fmt: skip
        metrics = process.wait_for("metrics on ")
        url = process.wait_for("passes ").split()[0]
        clients = [threading.Thread(target=ask, args=(url, client)) for client in range(10)]
        for client in clients:
            client.start()
        wait_until(lambda: len(answered) >= 50)
        text = httpx.get(metrics, timeout=LONG_S).text
        exit_code, out, err = process.end(number)
        join(*clients)
    assert (exit_code, err) == (code, said) and ("stopped by SIGTERM" in out) == (code == 0)
    lines = (folder / "trace.jsonl").read_text().splitlines()
    assert len(answered) >= 50 and len(answered) <= len(lines) <= len(answered) + 10
    assert all(json.loads(line)["input_length"] == 42 for line in lines)
    assert "the engine" in out and (folder / "out" / "shadow.html").read_text().count("the end") == 1
    assert "kvsim_shadow_requests_total" in text and 'kvsim_shadow_capacity_pages{ghost="gpu_2x",tier="gpu"}' in text
