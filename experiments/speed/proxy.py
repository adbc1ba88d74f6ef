"""What ``kvsim shadow listen=PORT`` adds to the time to the first byte of an answer.

A client asks an emulated vLLM 400 times directly and 400 times through the proxy, in turn, one request at a time, with prompts of
token ids and streamed answers; server, proxy and client are processes of one machine.

    python experiments/speed/proxy.py
"""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from urllib.parse import urlsplit

PLAIN = ("model=tiny", "tiers.gpu.capacity=100000pages")
ROUNDS, WARM_UP = 400, 20
LENGTHS = (100, 1000, 8000)


@contextmanager
def running(words: list[str], mark: str) -> Iterator[tuple[str, int]]:
    """Run ``kvsim`` in the background; yields the address in its line with ``mark``, and its process id."""
    process = subprocess.Popen([sys.executable, "-m", "kvsim", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if mark in line)
        yield next(word.rstrip(":;,") for word in line.split() if word.startswith("http")), process.pid
    finally:
        process.terminate()
        process.communicate(timeout=30)


def connection(url: str) -> http.client.HTTPConnection:
    """Return a connection that stays open."""
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port)


def first_byte_s(server: http.client.HTTPConnection, body: str) -> float:
    """Return the seconds from the request to the first byte of the answer's content."""
    began = perf_counter()
    server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = server.getresponse()
    answer.read(1)
    first = perf_counter() - began
    answer.read()
    return first


def cpu_s(pid: int) -> float:
    """Return the seconds of a processor that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    served = ["serve", *PLAIN, "serve.port=0", "serve.speed=100000", "serve.api=vllm"]
    print("prompt (tokens)  direct p10, p50 (ms)  through the proxy p10, p50 (ms)  added p50 (ms)  its processor (ms/request)")
    with running(served, "http") as (url, _):
        shadow = ["shadow", "listen=0", f"server={url}", *PLAIN, "output=outputs/proxy"]
        with running(shadow, "passes") as (proxy, pid):
            for length in LENGTHS:
                measure(connection(url), connection(proxy), pid, length)


def measure(direct: http.client.HTTPConnection, through: http.client.HTTPConnection, pid: int, length: int) -> None:
    """Print one line of the table."""
    options = {"max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps({"prompt": [1000 + at % 7 for at in range(length)], **options})
    for _ in range(WARM_UP):
        first_byte_s(direct, body), first_byte_s(through, body)
    used_s, times = cpu_s(pid), [(first_byte_s(direct, body), first_byte_s(through, body)) for _ in range(ROUNDS)]
    used_ms = 1000 * (cpu_s(pid) - used_s) / ROUNDS
    (low, middle), (slow_low, slow_middle) = (_ms([pair[side] for pair in times]) for side in (0, 1))
    shown = f"{length:15,}  {low:12.2f}, {middle:.2f}  {slow_low:23.2f}, {slow_middle:.2f}"
    print(f"{shown}  {slow_middle - middle:20.2f}  {used_ms:20.2f}")


def _ms(times_s: list[float]) -> tuple[float, float]:
    ordered = sorted(times_s)
    return 1000 * ordered[len(ordered) // 10], 1000 * ordered[len(ordered) // 2]


if __name__ == "__main__":
    main()
