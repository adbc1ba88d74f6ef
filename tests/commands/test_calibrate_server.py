"""``kvsim calibrate server=`` measures a server over HTTP, fits, and fits again without it; mistakes are one line."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kvsim.calibration.server import fit
from kvsim.cli import main
from kvsim.emulation.apis.base import ApiSettings
from kvsim.hardware.spec import HardwareSpec
from kvsim.plans.construct import construct
from tests.servers.emulated import Emulated, Faults, emulated

STEP_S = 10e-3
SERVER = [
    "preset=vllm", "model=llama3_8b", "hardware=h100", f"hardware.step_overhead_s={STEP_S}", "page_tokens=16",
    "tiers.gpu.capacity=2GiB", "engine.max_batch_tokens=512", "engine.max_running_requests=20",
]  # fmt: skip
"""Steps so long that a busy test machine does not matter much."""
SMALL = ["hardware=h100", "longest_tokens=900", "seconds=0"]


@pytest.fixture
def server() -> Iterator[Emulated]:
    with emulated(SERVER) as one:
        yield one


def read(path: Path) -> HardwareSpec:
    return construct(HardwareSpec, OmegaConf.to_container(OmegaConf.create(path.read_text())), path.stem)


@pytest.mark.long
def test_a_server_is_measured_and_its_measurements_are_fitted_again(
    server: Emulated, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", f"server={server.url}", "name=mine", f"output={folder}", *SMALL]) == 0
    assert {path.name for path in folder.iterdir()} == {"mine.yaml", "mine.measured.json"}
    shown = capsys.readouterr().out
    for what in ("Fitted", "Held out", "prompt of 256", "16 decoding after 256", "Errors, median and most", "mine.measured.json"):
        assert what in shown
    text = (folder / "mine.yaml").read_text()
    assert text.startswith("# vllm") and "batches held out" in text and max(map(len, text.splitlines())) <= 130
    assert "# As in hardware=h100, not measured.\nhost_to_device_bytes_per_s: 5.540e+10\n" in text
    found = read(folder / "mine.yaml")
    assert found.leap_overhead_s == 0.0 and found.noise is None and found.memory_bytes == 80_000_000_000
    assert 0.5 * STEP_S < found.step_overhead_s + 5e-3 < 4 * STEP_S

    again = [f"measured={folder}/mine.measured.json", "name=again", f"output={folder}", "hardware=h100"]
    assert main(["calibrate", *again]) == 0
    assert (folder / "again.yaml").read_text() == text
    assert not (folder / "again.measured.json").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["server=nowhere"], "server: url must be an address such as http://localhost:8000, not 'nowhere'"),
        (["server=http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer: "),
        (["measured=nowhere.json"], "measured: nowhere.json: No such file or directory"),
        (["measured=broken.json"], "measured: broken.json has no measurements of a server: "),
        (["measured=broken.json.gz"], "measured: broken.json.gz: Not a gzipped file"),
        (["measured=cut.json.gz"], "measured: cut.json.gz: the gzip file is truncated or damaged"),
        (["measured=other.json.gz"], "measured: other.json.gz has no measurements of a server: "),
        (["measured=other.json"], "measured: other.json has no measurements of a server: "),
        (["server=http://a:1", "measured=broken.json"], "server and measured exclude each other: leave one out"),
        (
            ["server=http://a:1", "hardware=linear"],
            "hardware=linear: step times by a formula cannot be fitted: choose the server's",
        ),
        (["server=http://a:1", "disk=."], "disk has no effect where a server is measured: leave it out"),
        (["measured=broken.json", "seconds=1"], "seconds has no effect where measurements are fitted again: leave it out"),
        (["hardware=h100"], "hardware has no effect without server= or measured=: leave it out"),
        (["hardware.gpus=2"], "hardware has no effect without server= or measured=: leave it out"),
        (["step_tokens=512"], "step_tokens has no effect without server= or measured=: leave it out"),
        (["pads_chunks=true"], "pads_chunks has no effect without server= or measured=: leave it out"),
        (["server=http://a:1", "step_tokens=0"], "step_tokens must be at least 1, not 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line(arguments: list[str], problem: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.json").write_text("{")
    (folder / "other.json").write_text('{"model": "none"}')
    packed = gzip.compress(b'{"model": "none"}')
    for name, content in (("broken", b"{"), ("cut", packed[:-4]), ("other", packed)):
        (folder / f"{name}.json.gz").write_bytes(content)
    before = sorted(folder.iterdir())
    assert main(["calibrate", *arguments, "output=."]) == 2
    shown = capsys.readouterr()
    assert re.match(f"kvsim: {re.escape(problem)}", shown.err) and shown.err.count("\n") == 1 and not shown.out
    assert sorted(folder.iterdir()) == before


RECORDED = Path(__file__).parents[2] / "experiments/real_servers/h100_vllm.measured.json.gz"
"""What a real server took."""


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("batches.0.kind", "foo", "Invalid enum value 'foo' - at `$.batches[0].kind`"),
        ("batches.0.tokens", 0, "batches[0] computes nothing"),
        ("batches.30.requests", 0, "batches[30] computes nothing"),
        ("batches.30.context", -16, "Expected `int` >= 0 - at `$.batches[30].context`"),
        ("step_tokens", 0, "Expected `int` >= 1 - at `$.step_tokens`"),
        ("step_tokens", -1, "Expected `int` >= 1 - at `$.step_tokens`"),
        ("page_tokens", 0, "Expected `int` >= 1 - at `$.page_tokens`"),
        ("played.3.batch", 1000, "played[3] is of batch 1000, of 71"),
        ("played.3.requests.0.sent_s", 1e300, "Expected `float` <= 1000000000000.0 - at `$.played[3].requests[0].sent_s`"),
        ("played.3.requests", [], "played[3] has 0 requests, its batch "),
        ("played.3.requests.0.cached_tokens", 10**9, "Expected `int` <= 16777216 - at `$.played[3].requests[0].cached_tokens`"),
        ("played.3.requests.0.cached_tokens", 1 << 20, "played[3] has a request with more cached tokens than its prompt has"),
    ],
)
def test_measurements_that_do_not_fit_are_one_line(
    path: str, value: object, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_changed(folder / "bad.json", path, value)
    assert main(["calibrate", "measured=bad.json", "output=.", "hardware=h200"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"kvsim: measured: bad.json has no measurements of a server: {problem}")
    assert shown.err.count("\n") == 1 and not shown.out


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"more": ' + b"[" * 5_000, "maximum recursion depth exceeded"),
        (b'{"source": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
    ],
    ids=["deep", "no text"],
)
def test_what_is_no_json_is_one_line(content: bytes, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.json").write_bytes(content)
    assert main(["calibrate", "measured=bad.json", "output=.", "hardware=h200"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvsim: measured: bad.json has no measurements of a server: ") and problem in error
    assert error.count("\n") == 1


def write_changed(file: Path, path: str, value: object) -> None:
    """Write the recorded measurements with one value changed."""
    told = at = json.loads(gzip.decompress(RECORDED.read_bytes()))
    *names, last = [int(name) if name.isdigit() else name for name in path.split(".")]
    for name in names:
        at = at[name]
    at[last] = value
    file.write_text(json.dumps(told))


def test_the_file_says_how_good_the_measurements_are(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever tiles are fitted: curves with one kind of them take half the time."""
    monkeypatch.setattr(fit, "TILES", (1,))
    write_changed(folder / "one.json", "served_model", "llama\nflops_per_s: 1.0\n#")
    assert main(["calibrate", "measured=one.json", "name=one", "output=.", "hardware=h200"]) == 0
    printed = capsys.readouterr().out
    text = (folder / "one.yaml").read_text()
    first = text[: text.index("_target_")].splitlines()
    assert all(line.startswith("# ") and len(line) <= 130 for line in first) and text.count("\nflops_per_s:") == 1
    assert "(llama flops_per_s: 1.0 #)" in first[0] and read(folder / "one.yaml").flops_per_s == 790e12
    for said in (
        "1 of 71 batches lost, 0 with a single sample; 4 of 256 plays of a batch lost",
        "round 2: the client was too slow: 1 of 100 requests was sent 51 ms late or more",
    ):
        assert any(said in line for line in first) and said in printed


@pytest.mark.parametrize("dialect", ["openai", "vllm"])
def test_a_server_that_does_not_say_how_long_its_steps_are_is_asked_about(
    dialect: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with emulated(SERVER, dialect=dialect, settings=ApiSettings(has_reset=False)) as server:
        assert main(["calibrate", f"server={server.url}", "output=.", *SMALL]) == 2
    assert capsys.readouterr().err.startswith("kvsim: step_tokens: the server does not say how many tokens a step computes")
    assert not list(folder.iterdir())


def test_a_server_that_fails_ends_with_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with emulated(SERVER, faults=Faults(status=dict.fromkeys(range(10_000), 500))) as server:
        assert main(["calibrate", f"server={server.url}", "output=.", *SMALL]) == 2
    shown = capsys.readouterr().err
    assert re.match(r"kvsim: server: \d+ of \d+ requests failed: \d+ x HTTP 500: not now\n$", shown)
    assert not list(folder.iterdir())
