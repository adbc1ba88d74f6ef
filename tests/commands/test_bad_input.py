"""A user's mistake ends with one line, exit code 2, and no file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.cli import main

MISTAKES = [
    (["page_tokns=16"], "page_tokns: there is no such setting; did you mean page_tokens?"),
    (["evicton=lru"], "evicton: there is no such setting; did you mean eviction?"),
    (["-m", "eviction=lru,null"], "eviction=lru,null: choose one by name, eviction=NAME, or leave it out"),
    (["seed=range(1,3)"], "seed=range(1,3) lists several values: add -m"),
    ([f"seed={'9' * 5000}"], "cannot parse the override 'seed=99999"),
    (["seed='1\n2'"], "seed: '1 2' is not a whole number"),
    (["output='a\0b'"], "the argument \"output='a\\x00b'\" contains a NUL character"),
    (["trace.path=\udcff"], "the argument 'trace.path=\\udcff' is not UTF-8: rename the file"),
    (["seed=${seed}"], "seed: Recursive interpolation detected"),
    (["hydra.run.dir=x"], "hydra.run.dir=x: choose the run's folder with output=DIR"),
    (["hydra.searchpath=[nowhere]"], "Hydra cannot use hydra.searchpath=[nowhere]: provider="),
    (["hydra.callbacks.sweep=null"], "hydra.callbacks.sweep: there is no such setting"),
    (["-m", "hydra.job.chdir=true"], "hydra.job.chdir has no effect: kvsim runs this itself, not Hydra; leave it out"),
    (["-m", "seed=interval(0,1)"], "seed=interval(0,1): an interval"),
    (["-m", "eviction=glob(zz)"], "eviction=glob(zz) matches nothing"),
    (["hydra.launcher=null"], "hydra.launcher=null: choose one by name, hydra/launcher=NAME"),
    (["-m", "hydra.launcher._target_=no"], "Hydra cannot use hydra.launcher._target_=no: Invalid plugin 'no'"),
    (["-m", "hydra.sweeper.max_batch_size=0"], "hydra.sweeper.max_batch_size must be at least 1, not 0"),
    (["-m", "output=${nope}"], "output: ${nope} refers to a setting that does not exist"),
    (["--cfg", "job", "--package", "nope"], "--package nope: the configuration has no such part"),
    (["eviction=lur"], "eviction=lur: there is no such choice; did you mean lru? choose from "),
    (
        ["trace=[mooncake,bailian]"],
        "trace=[mooncake,bailian]: choose one; to compare several, run kvsim with -m and trace=mooncake,b",
    ),
    (["~trace"], "~trace: every run needs one; choose another with trace=NAME"),
    (["~trce"], "trce: there is no such setting; did you mean trace?"),
    (["+timeline=true"], "+timeline: there is such a setting already; leave out the +"),
    (["limit=5"], "limit: there is no such setting; did you mean trace.limit?"),
    (
        ["eviction@tiers.cup.eviction=lru"],
        "eviction@tiers.cup.eviction: there is no such setting; did you mean eviction@tiers.cpu.e",
    ),
    (["hydra/launcher=ray"], "hydra/launcher=ray is not installed: pip install 'kvsim[ray]'"),
    (["hydra.mode=MULTIRN"], "hydra.mode: Invalid value 'MULTIRN', expected one of [RUN, MULTIRUN]"),
    (["output=${nope}"], "output: ${nope} refers to a setting that does not exist"),
    (["trace=mooncake", "trace.path=x", "trace.tail=ful"], "trace.tail must be one of full, all, not 'ful'; did you mean full?"),
    (["eviction._target_=null"], "eviction._target_: names no class; choose by name, eviction=NAME"),
    (["-m", "output=a,b"], "output=a,b: output is one for all jobs of a sweep; set a single value"),
    (["--multirn"], "there is no flag --multirn; did you mean --multirun?"),
    (["-m", "--cfg", "job"], "--multirun and --cfg exclude each other"),
    (["--config-name", "nope"], "there is no file nope.yaml in the folders of settings"),
    (["tiers.cpu.eviction=slru"], "tiers.cpu.eviction: use eviction@tiers.cpu.eviction=NAME"),
    (
        ["preset=vllm_offload", "tiers.cpu.eviction=arc"],
        "tiers.cpu.eviction=arc: choose one by name, eviction@tiers.cpu.eviction=NAME",
    ),
    (["tiers.cpu.eviction.protected_hits=1"], "tiers.cpu.eviction.protected_hits: the tier has no policy of its own"),
    (["eviction=lru,fifo"], "eviction=lru,fifo lists several values: add -m"),
    (["page_tokens"], "cannot parse the override 'page_tokens': use KEY=VALUE"),
    (["--cfg", "jobs"], "--cfg jobs: there is no such choice; did you mean job? choose from job, hydra, all"),
    (["slo.classes=[1]"], "slo.classes[0] must be a mapping, {name: value, ...}, not 1"),
    (["slo.classes={a: 1}"], "slo.classes: a list is expected, [...], not a mapping"),
    (["slo.classes=chat"], "slo.classes must be a list, [...], not 'chat'"),
    (["engine.speculation=3"], "engine.speculation must be a mapping of settings, {name: value, ...}, not 3"),
    (["engine.speculation=[3]"], "engine.speculation: a mapping is expected, {name: value, ...}, not a list"),
    (["page_tokens=many"], "page_tokens: 'many' is not a whole number"),
    (["rules.cache_output=maybe"], "rules.cache_output: 'maybe' is not true or false"),
    (["engine.max_running_requests=null"], "engine.max_running_requests: null is not a whole number"),
    (["hardware.flops_per_s=fast"], "hardware.flops_per_s: 'fast' is not a number"),
    (["."], ".: is a folder; give a trace file, or settings as KEY=VALUE"),
    (["--trace", "x"], "there is no flag --trace; did you mean --traceback? (settings have no dashes: KEY=VALUE)"),
    (["trace=mooncake", "trace.path=missing.jsonl"], "missing.jsonl: cannot be read: No such file"),
    (["output=file/run"], "output: cannot write to file/run"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_ends_with_one_line(
    arguments: list[str], expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ("replay", "simulate")[len(expected) % 2]
    assert main([command, *arguments]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith(f"kvsim: {expected}")
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    if "-m" not in arguments:
        assert [path.name for path in folder.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["leaderboard", "leaderboard.policies=lru,slru"],
            "leaderboard.policies=lru,slru lists several values, and kvsim leaderboard takes a single configuration: a list is "
            "written 'leaderboard.policies=[lru,slru]'",
        ),
        (
            ["plan", "eviction=lru,slru"],
            "eviction=lru,slru lists several values, and kvsim plan takes a single configuration: choose one",
        ),
        (["plan", "prices=none.yaml", "slo.ttft_s=1"], "none.yaml: there is no such file"),
        (["plan", "prices=.", "slo.ttft_s=1"], ".: cannot be read: Is a directory"),
        (
            ["shadow", "events=localhost:5557"],
            "shadow.events: localhost:5557 is no file; the address of an engine begins with tcp",
        ),
    ],
)
def test_a_mistake_of_other_commands_ends_with_one_line(
    arguments: list[str], expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith(f"kvsim: {expected}") and shown.err.count("\n") == 1 and shown.out == ""
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_events_without_pyzmq_are_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("zmq", "zmq.asyncio"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["shadow", "events=tcp://localhost:1"]) == 2
    assert capfd.readouterr().err == "kvsim: pyzmq is missing, which KV events are sent with: pip install kvsim[servers]\n"
    assert [path.name for path in folder.iterdir()] == ["file"]


def line(**fields: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]} | fields)


BAD_TRACES = [
    ("no JSON", "trace.jsonl:2: not JSON"),
    (line(input_length=-1), "trace.jsonl:2: input_length must be at least 1, not -1"),
]


SCHEDULED = ["cluster.engines=4", "autoscaling=schedule"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["hardware.rank_faults=[1]"], "hardware.rank_faults[0] must be a mapping of settings, {name: value, ...}, not 1"),
        ([*SCHEDULED, "autoscaling.steps=abc"], "autoscaling.steps must be a list, [...], not 'abc'"),
        (
            [*SCHEDULED, "autoscaling.steps=[[0,9]]"],
            "autoscaling: ScheduledEngines has 9 engines in steps, from 0 s on",
        ),
    ],
)
def test_a_mistake_in_a_simulation_ends_with_one_line(
    arguments: list[str], expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith(f"kvsim: {expected}") and shown.err.count("\n") == 1 and shown.out == ""
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_curve_without_settings_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", "trace.sessions=2", "curve=null"]) == 2
    assert capfd.readouterr().err == "kvsim: curve is missing: set curve=NAME\n"


@pytest.mark.parametrize(("second_line", "expected"), BAD_TRACES)
def test_a_bad_trace_is_named_with_its_line(
    second_line: str, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "trace.jsonl").write_text(f"{line()}\n{second_line}\n")
    assert main(["replay", "trace=mooncake", "trace.path=trace.jsonl"]) == 2
    shown = capfd.readouterr().err
    assert shown.startswith(f"kvsim: {expected}")
    assert shown.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["file", "trace.jsonl"]


def test_the_process_ends_with_exit_code_2_and_no_traceback(folder: Path) -> None:
    command = [sys.executable, "-c", "import sys; from kvsim.cli import main; sys.exit(main())", "replay", "eviction=belaady"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvsim: eviction=belaady: there is no such choice")
    assert ended.stderr.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["file"]


BAD_FILES = [
    (b"a: [1,\nb: 2\n", "conf/model/mine.yaml:3: not valid YAML: "),
    (b"a: 1\na: 2\n", "conf/model/mine.yaml:2: not valid YAML: found duplicate key a"),
    (b"\xde\xad\xbe\xef", "conf/model/mine.yaml: not a YAML file: "),
    (b"", "model."),
    (b"just a text\n", "model.just a text: there is no such setting"),
]


@pytest.mark.parametrize(("content", "expected"), BAD_FILES)
def test_a_file_of_settings_that_is_no_yaml_is_named(
    content: bytes, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "mine.yaml").write_bytes(content)
    assert main(["replay", "--config-dir", "conf", "model=mine"]) == 2
    shown = capfd.readouterr().err
    assert shown.removeprefix("kvsim: ").removeprefix(f"{folder}/").startswith(expected)
    assert shown.count("\n") == 1


OTHER_BAD_FILES = [
    (b"[1, 2]\n", "mine.yaml: it must be a mapping of settings"),
    (b"_target_: !!python/object:os.system x\n", "mine.yaml:1: not valid YAML: could not determine a constructor"),
    (b"_target_: nowhere.Mine\n", "eviction._target_: nowhere.Mine does not exist"),
    (
        b"_target_: kvsim.trace.synthetic.Synthetic\n",
        "eviction._target_: kvsim.trace.synthetic.Synthetic is not a subclass",
    ),
]


@pytest.mark.parametrize(("content", "expected"), [*BAD_FILES[:3], *OTHER_BAD_FILES])
@pytest.mark.parametrize("command", [["policies", "eviction"], ["curve", "trace.sessions=2", "curve.policies=[mine]"]])
def test_every_reader_of_files_of_settings_names_them(
    command: list[str], content: bytes, expected: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "conf" / "eviction").mkdir(parents=True)
    (folder / "conf" / "eviction" / "mine.yaml").write_bytes(content)
    assert main([*command, "--config-dir", "conf"]) == 2
    shown = capfd.readouterr().err.replace("curve.policies: mine._target_", "eviction._target_")
    assert expected.replace("conf/model", "conf/eviction") in shown
    assert shown.startswith("kvsim: ") and shown.count("\n") == 1 and not (folder / "outputs").exists()
