"""``kvsim serve``: its lines, its ports, and how it ends."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest

from kvsim.cli import main
from kvsim.kv_events.messages import BlockStored
from kvsim.kv_events.subscriber import Subscriber
from tests.waiting import LONG_S, join

SMALL = ("preset=vllm", "tiers.gpu.capacity=200pages", "serve.port=0")


class Lines:
    """Standard output that tells when it has as many lines as are waited for."""

    def __init__(self, expected: int) -> None:
        self.text = ""
        self._expected = expected
        self.has_all = Event()

    def write(self, text: str) -> int:
        self.text += text
        if self.text.count("\n") >= self._expected:
            self.has_all.set()
        return len(text)

    def flush(self) -> None:
        pass

    @property
    def urls(self) -> list[str]:
        return [line.split(": ")[0] for line in self.text.splitlines() if line.startswith("http")]


def served(
    monkeypatch: pytest.MonkeyPatch, *words: str, client: Callable[[Lines], None], engines: int = 1, number: int = signal.SIGTERM
) -> tuple[int, str]:
    """Run the command while ``client`` talks to it, then send it a signal. Returns the exit code and what it has printed."""
    lines, failed, has_ended = Lines(engines), list[BaseException](), Event()
    monkeypatch.setattr("sys.stdout", lines)

    def talk() -> None:
        try:
            assert lines.has_all.wait(LONG_S) and not has_ended.is_set()
            client(lines)
        except BaseException as error:
            failed.append(error)
        if not has_ended.is_set():  # or nobody takes the signal
            os.kill(os.getpid(), number)

    thread = Thread(target=talk)
    thread.start()
    try:
        code = main(["serve", *words])
    finally:
        has_ended.set()
        lines.has_all.set()
        join(thread)
        monkeypatch.undo()
    if failed:
        raise failed[0]
    return code, lines.text


def complete(url: str, **more: Any) -> Any:
    asked = {"prompt": list(range(100)), "max_tokens": 3, "ignore_eos": True} | more
    return httpx.post(f"{url}/v1/completions", json=asked, verify=False, trust_env=False, timeout=LONG_S).json()


def test_engines_are_independent_and_have_a_port_each(monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[int] = []

    def client(lines: Lines) -> None:
        first, second = lines.urls
        for url in (first, first, second):
            cached.append(complete(url)["usage"]["prompt_tokens_details"]["cached_tokens"])

    code, text = served(monkeypatch, *SMALL, "cluster.engines=2", "serve.speed=50", client=client, engines=2)
    assert code == 0 and cached == [0, 96, 0]
    *lines, last = text.splitlines()
    assert all(
        line.endswith(": llama3_8b behind vllm's interface; gpu 200 pages of 16 tokens; 50 times as fast as real time")
        for line in lines
    )
    assert last == "stopped by SIGTERM: no request was under way"


def test_sigterm_lets_requests_under_way_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[int] = []
    readers: list[Thread] = []

    def client(lines: Lines) -> None:
        url = lines.urls[0]
        body = {"prompt": [1, 2], "max_tokens": 150, "stream": True, "stream_options": {"include_usage": True}}

        def read() -> None:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, trust_env=False, timeout=LONG_S) as response:
                begun.set()
                events = [line for line in response.iter_lines() if line]
            answers.append(json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"])

        begun = Event()
        readers.append(Thread(target=read))
        readers[0].start()
        assert begun.wait(LONG_S)

    code, text = served(monkeypatch, *SMALL, "serve.drain_s=60", client=client)
    join(*readers)
    assert code == 0 and answers == [150]
    assert text.splitlines()[-1] == "stopped by SIGTERM: 1 requests were under way: 1 have ended, 0 were cut"


def test_ctrl_c_after_the_time_to_drain_cuts_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[socket.socket] = []

    def client(lines: Lines) -> None:
        body = json.dumps({"prompt": [1, 2], "max_tokens": 3000, "stream": True}).encode()
        connection = socket.create_connection(("127.0.0.1", int(lines.urls[0].rsplit(":", 1)[1])), timeout=LONG_S)
        opened.append(connection)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert connection.recv(100)

    try:
        code, _ = served(monkeypatch, *SMALL, "serve.drain_s=0", "serve.longest_tokens=3100", client=client, number=signal.SIGINT)
    finally:
        for connection in opened:
            connection.close()
    assert code == 130
    assert "kvsim: interrupted: 1 requests were under way: 0 have ended, 1 were cut" in capsys.readouterr().err


def test_events_are_published_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []

    def client(lines: Lines) -> None:
        asyncio.run(asyncio.wait_for(listen(lines), LONG_S))

    async def listen(lines: Lines) -> None:
        """Ask for more until an event comes: those before the subscription was there are replayed with it."""
        *_, events, replay = [word.rstrip(",;") for word in lines.text.split() if word.startswith("tcp://")]
        async with Subscriber(events, replay) as subscriber:
            asks = asyncio.create_task(ask(lines.urls[0]))
            async for received in subscriber:
                stored.extend(len(event.block_hashes) for event in received.batch.events if isinstance(event, BlockStored))
                if sum(stored) >= 6:
                    break
            asks.cancel()

    async def ask(url: str) -> None:
        for first in range(100):
            await asyncio.to_thread(complete, url, prompt=list(range(first * 1000, first * 1000 + 100)))
            await asyncio.sleep(0.2)

    words = ("serve.events=tcp://127.0.0.1:*", "serve.replay=tcp://127.0.0.1:*", "serve.speed=20")
    code, _ = served(monkeypatch, *SMALL, *words, client=client)
    assert code == 0 and sum(stored[:1]) == 6, "100 tokens are six full blocks"


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "preset=vllm", "tiers.gpu.capacity=200pages", f"serve.port={port}"]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"kvsim: serve.port: 127.0.0.1:{port} cannot be had, address already in use") and error.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("trace=synthetic",), "trace has no effect on kvsim serve"),
        (("routing=random", "cluster.engines=2"), "routing has no effect on kvsim serve"),
        (("cluster.prefill=1", "cluster.decode=1"), "cluster.prefill has no effect on kvsim serve"),
        (("preset=vllm_offload", "cluster.engines=2"), "2 engines of a host share what it has below their GPUs"),
        (("cluster.engines_per_host=1",), "cluster.engines_per_host has no effect with one engine"),
        (("serve.api=vlm",), "serve.api must be one of vllm, sglang, openai, or null, not vlm"),
        (("serve.speed=0",), "serve.speed must be"),
        (("serve.port=70000",), "serve.port must be"),
        (("serve.port=65535", "cluster.engines=2"), "engine 1 would have the port 65536"),
        (("serve.output_spread=1",), "serve.output_spread has no effect without output_tokens"),
        (("serve.replay=tcp://127.0.0.1:1",), "serve.replay has no effect without events"),
        (("serve.events=127.0.0.1:5557",), "serve.events: an endpoint of KV events must begin with tcp://"),
        (("serve.events=tcp://127.0.0.1:5557", "serve.event_format=vlm"), "an encoding of KV events must be one of"),
        (("serve.events=tcp://127.0.0.1:*", "serve.api=openai"), "an engine behind the interface openai has no events"),
        (
            ("preset=vllm", "serve.events=tcp://127.0.0.1:*", "serve.self_describing=true"),
            "serve.self_describing has no effect without a tier below the GPU",
        ),
        (
            ("preset=sglang_hicache", "serve.events=tcp://127.0.0.1:*", "serve.self_describing=true"),
            "serve.self_describing has no effect on events of sglang",
        ),
        (("serve.tokenizer=nowhere",), "serve.tokenizer: nowhere/tokenizer.json does not exist"),
        (("serve.prot=1",), "serve.prot"),
        (("-m",), "-m: kvsim serve takes a single configuration"),
        (("eviction=belady",), "Belady is a bound"),
    ],
)
def test_what_has_no_effect_or_makes_no_sense_is_one_line(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_preset_with_a_trace_of_its_own_is_served_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = served(monkeypatch, "preset=mooncake_paper", "serve.port=0", client=lambda lines: None)
    assert code == 0 and "pages of 512 tokens" in text


def test_serving_has_no_effect_on_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "serve.port=1"]) == 2
    assert "serve.port has no effect on kvsim simulate" in capsys.readouterr().err
