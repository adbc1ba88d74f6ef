"""``kvsim plan`` where the answer is known.

A request comes every second and takes 0.25 s of an engine, one at a time: at a rate of 7, one engine falls behind and two do not.
On the machine ``slow`` it takes 0.5 s: four engines are needed. ``small`` and ``large`` differ in what fits into their memory.
"""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvsim.cli import main
from kvsim.plans.build import build_run
from kvsim.sweeps import purchasing

REQUESTS = 100
MACHINES = {"fast": "fixed_s: 0.25", "slow": "fixed_s: 0.5", "small": "memory_bytes: 1064960", "large": "memory_bytes: 2000000"}
RATES = "prefill_token_s: 0\ndecode_request_s: 0\nchunk_context_s: 0\ndecode_context_s: 0\n"
ALWAYS = ("engine.max_running_requests=1", "slo.ttft_s=0.8", "--config-dir", "conf", "output=out")
TINY = ("model=tiny", "tiers.gpu.gpu_memory_utilization=1", "tiers.gpu.workspace=0")
PRICES = "currency: USD\nper: hour\ngpus: {fast: 3, slow: 1.25}\nchoices: {engines: [1, 2, 4]}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "hardware").mkdir(parents=True)
    for name, own in MACHINES.items():
        text = f"# A machine.\ndefaults:\n  - linear\n\n{RATES}{own}\n"
        (tmp_path / "conf" / "hardware" / f"{name}.yaml").write_text(text)
    write_trace(tmp_path / "trace.jsonl", [512] * REQUESTS)
    (tmp_path / "prices.yaml").write_text(PRICES)
    return tmp_path


def write_trace(path: Path, lengths: list[int]) -> None:
    """Prompts unlike all others, one a second, with answers of one token."""
    lines = [
        {
            "timestamp": 1000 * at,
            "input_length": length,
            "output_length": 1,
            "hash_ids": [2 * at, 2 * at + 1][: -(-length // 512)],
        }
        for at, length in enumerate(lengths)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def plan(*arguments: str) -> int:
    return main(["plan", "prices=prices.yaml", "trace=mooncake", "trace.path=trace.jsonl", *ALWAYS, *arguments])


def record(name: str = "out") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(name, "plan.json").read_text())
    return found


def outcomes(found: dict[str, Any]) -> list[tuple[float, str, int, str]]:
    return [(one["price"], one["gpu"], one["engines"], one["outcome"]) for one in found["candidates"]]


def test_the_cheapest_that_holds_is_found_and_what_costs_much_more_is_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("trace.rate=7", "plan.beyond=0.5") == 0
    found = record()
    assert outcomes(found) == [
        (1.25, "slow", 1, "fails"), (2.5, "slow", 2, "fails"), (3.0, "fast", 1, "fails"),
        (5.0, "slow", 4, "holds"), (6.0, "fast", 2, "holds"), (12.0, "fast", 4, "dearer"),
    ]  # fmt: skip
    assert found["cheapest"] == 3 and found["price_unit"] == "USD per hour"
    assert found["candidates"][0]["reason"].startswith("GPU, 100.00% busy")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Number 3 is the cheapest that holds, at 5.00 USD per hour: 4x slow (4 x TP1)." in shown
    assert "1 from 12.00 on were not simulated" in shown and "out: plan.json plan.csv plan.html" in shown


def test_the_line_that_simulates_the_cheapest_gives_its_result() -> None:
    assert plan("trace.rate=7") == 0
    found = record()
    best = found["candidates"][found["cheapest"]]
    words = shlex.split(found["simulate"])
    assert words[:2] == ["kvsim", "simulate"] and main([*words[1:], "output=again"]) == 0
    again = json.loads(Path("again/result.json").read_text())
    assert again["slo"]["attainment"] == best["attainment"] == 1.0 and again["ttft_s"]["p99"] == best["ttft_s_p99"]
    assert again["config_hash"] == json.loads(Path("out", best["folder"], "result.json").read_text())["config_hash"]


def test_cpu_memory_is_paid_for_each_copy_of_the_kv(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two KV heads on four GPUs are two copies: 4 GPUs at 1, and 2 x 3 GiB at 0.5. On two GPUs there is one: 2 + 1.5."""
    prices = "per: hour\ngpus: {fast: 1}\ncpu_gib: 0.5\nchoices: {gpus_per_engine: [4, 2], cpu: [3GiB]}\n"
    (folder / "prices.yaml").write_text(prices)
    assert plan("model=tiny", "model.heads=4", "model.kv_heads=2", "plan.beyond=null") == 0
    found = record()["candidates"]
    assert [(one["price"], one["cpu_bytes"] // 2**30, one["cpu_copies"]) for one in found] == [(3.5, 3, 1), (7.0, 3, 2)]
    shown = capsys.readouterr().out
    assert "4x fast (1 x TP4), 2 x 3 GiB of CPU memory: 100.00% meet" in shown
    assert re.search(r"7\.00 4x fast +1 x TP4 +2 x 3 GiB", shown), "as the price differs by it"


def test_a_configuration_with_cpu_memory_is_planned_once_before_any_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "prices.yaml").write_text("per: hour\ngpus: {fast: 1}\ncpu_gib: 1\nchoices: {engines: [1, 2], cpu: [1MiB, 2MiB]}\n")
    planned = list[str]()

    def build(config: Any, **more: Any) -> Any:
        planned.append(f"{config.cluster.engines} {config.tiers.cpu.capacity}")
        return build_run(config, **more)

    monkeypatch.setattr(purchasing, "build_run", build)
    assert plan() == 0
    found = record()["candidates"]
    assert sorted(planned[: len(found)]) == ["1 1MiB", "1 2MiB", "2 1MiB", "2 2MiB"]
    ran = [one for one in found if one["outcome"] in ("holds", "fails")]
    assert len(planned) == len(found) + 1 + len(ran), "one for the trace, and one for each run"


def test_the_rate_may_be_called_as_for_saturate() -> None:
    assert plan("saturate.rate=1") == 0
    assert record()["candidates"][0]["outcome"] == "holds" and record()["cheapest"] == 0


def test_nothing_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prices.yaml").write_text("per: hour\ngpus: {fast: 1, slow: 2}\n")
    assert plan("slo.ttft_s=0.1", "saturate.attainment=0.9") == 1
    found, shown = record(), capsys.readouterr()
    assert found["cheapest"] is None and {one["outcome"] for one in found["candidates"]} == {"fails"}
    assert shown.err == "kvsim: no configuration meets the objectives: the reasons are in the table\n"
    assert "even without load, 100.0% of the prompts, all of 512 tokens or more, take longer" in found["candidates"][0]["reason"]
    assert "No configuration holds." in shown.out and "Start it" not in shown.out


def test_files_have_all_configurations() -> None:
    assert plan("trace.rate=7", "plan.beyond=0") == 0
    with Path("out/plan.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["number"], row["outcome"]) for row in rows[2:5]] == [("2", "fails"), ("3", "holds"), ("4", "dearer")]
    page = Path("out/plan.html").read_text()
    assert "Price and attainment" in page and "vllm serve MODEL" in page and "4x slow" in page


def test_what_has_run_is_kept_when_prices_change(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("trace.rate=7", "plan.beyond=null") == 0
    before = {path: path.stat().st_mtime_ns for path in folder.glob("out/*/result.json")}
    assert len(before) == 6
    (folder / "prices.yaml").write_text(PRICES.replace("1.25", "2"))
    assert plan("trace.rate=7", "plan.beyond=null") == 0
    assert {path: path.stat().st_mtime_ns for path in folder.glob("out/*/result.json")} == before
    found = record()
    best = found["candidates"][found["cheapest"]]
    assert (best["gpu"], best["engines"], best["price"]) == ("fast", 2, 6.0)
    assert "finished" not in capsys.readouterr().err


def test_an_engine_that_is_too_small_for_the_requests_is_skipped_with_more_of_its_kind(folder: Path) -> None:
    """A tenth of the prompts has 1,024 tokens and 600 fit: no number of engines helps. The winner is that of trying all."""
    write_trace(folder / "trace.jsonl", [1024 if at % 10 == 0 else 512 for at in range(REQUESTS)])
    prices = "per: hour\ngpus: {small: 1, large: 10}\nchoices: {engines: [1, 2, 3], gpus_per_engine: [1]}\n"
    (folder / "prices.yaml").write_text(prices)
    assert plan(*TINY) == 0
    found = record()
    assert [one["outcome"] for one in found["candidates"]] == [
        "fails", "fails for certain", "fails for certain", "holds", "holds", "dearer",
    ]  # fmt: skip
    assert found["candidates"][0]["reason"].startswith("10 requests never fit into the GPU tier")
    assert (
        found["candidates"][1]["reason"] == "10 requests never fit into the GPU tier, as for number 0: the GPU tier is no larger"
    )
    (folder / "prices.yaml").write_text(prices.replace("1, 2, 3", "2"))
    assert plan(*TINY, "output=all") == 0
    apart = record("all")["candidates"]
    assert apart[0]["outcome"] == "fails" and apart[0]["engines"] == 2 and apart[0]["rejected"] == 10, "run, it fails as well"


def test_a_drive_has_its_rates_and_its_price_on_each_host(folder: Path) -> None:
    (folder / "prices.yaml").write_text("""
per: month
gpus_per_host: 2
gpus: {fast: 100}
cpu_gib: 0.5
drives: {x: {price: 7, capacity: 1GiB, hardware.disk_read_bytes_per_s: 3GB/s}}
choices: {engines: [4], cpu: [8GiB], drives: [none, x]}
""")
    assert plan("plan.beyond=null") == 0
    first, second = record()["candidates"]
    assert (first["price"], first["drive"]) == (4 * 100 + 2 * 8 * 0.5, "none")
    assert (second["price"], second["drive"]) == (4 * 100 + 2 * 8 * 0.5 + 2 * 7, "x")
    config = json.loads(Path("out", second["folder"], "result.json").read_text())["config"]
    assert config["hardware"]["disk_read_bytes_per_s"] == 3e9 and config["tiers"]["disk"]["capacity"] == "1GiB"
    assert config["cluster"]["engines_per_host"] == 2 and config["tiers"]["cpu"]["scope"] == "engine"


def test_a_measured_drive_gives_way_to_the_rates_of_one_with_a_price(folder: Path) -> None:
    """Its curves would win over the rate."""
    (folder / "prices.yaml").write_text("""
per: hour
gpus: {h200_measured: 1}
cpu_gib: 0
drives: {x: {price: 1, capacity: 1GiB, hardware.disk_read_bytes_per_s: 3e9}}
choices: {cpu: [8GiB], drives: [x]}
""")
    assert plan() == 0
    config = json.loads(Path("out", "0", "result.json").read_text())["config"]
    assert config["hardware"]["disk_curves"] is None and config["hardware"]["link_curves"] is not None


def test_a_policy_that_changes_nothing_is_left_out_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = "choices: {cpu: [0, 1GiB], policies: ['placement=write_back', lru]}"
    (folder / "prices.yaml").write_text(f"per: hour\ngpus: {{fast: 1}}\ncpu_gib: 0.1\n{choices}\n")
    assert plan("plan.beyond=null") == 0
    assert len(record()["candidates"]) == 4
    assert "placement=write_back is left out in 1 of 2 jobs, where it has no effect" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("cluster.engines=2",), "cluster.engines: leave it out: prices.yaml chooses what costs money"),
        (("hardware=h100",), "hardware: leave it out: prices.yaml"),
        (("tiers.remote.capacity=1GiB",), "tiers.remote.capacity: leave it out: prices.yaml"),
        (("slo.ttft_s=null",), "slo: set slo.ttft_s or slo.tpot_s, or both: kvsim plan searches for the cheapest configuration"),
        (("plan.prices=null",), "prices is missing: set prices=FILE"),
        (("plan.beyond=-1",), "plan.beyond must be"),
        (("saturate.price_per_hour.gpu=2",), "saturate.price_per_hour.gpu has no effect on kvsim plan"),
        (("trace.rate=1", "saturate.rate=2"), "trace.rate has no effect with saturate.rate"),
        (("-m",), "-m: kvsim plan takes a single configuration"),
        (("prices=other.yaml",), "other.yaml"),
        (("trace.path=none.jsonl",), "none.jsonl: cannot be read"),
        (("page_tokens=0",), "page_tokens must be at least 1"),
        (("model=hf", "model.path=No/Such"), "model.path: No/Such"),
        (("saturate.attainment=2",), "saturate.attainment must be"),
        (("saturate.attainment=abc",), "saturate.attainment: 'abc' is not a number"),
        (("hardware.flops_efficiency=5",), "hardware.flops_efficiency must be"),
        (("slo.ttft_s=2sec",), "slo.ttft_s: 2sec is not a time"),
        (("placement=write_back",), "placement has no effect"),
        (("timeline=true",), "timeline has no effect on kvsim plan"),
    ],
)
def test_mistakes_are_found_before_any_run(
    arguments: tuple[str, ...], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*arguments) == 2
    line = capsys.readouterr().err
    assert line.startswith("kvsim: ") and expected in line and line.count("\n") == 1
    assert not (folder / "out").exists()


def test_a_policy_that_there_is_not_is_told_with_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prices.yaml").write_text("per: hour\ngpus: {fast: 1}\nchoices: {policies: [slur]}\n")
    assert plan() == 2
    line = capsys.readouterr().err
    assert (
        line.startswith("kvsim: prices.yaml: eviction=slur: there is no such choice; did you mean slru?")
        and line.count("\n") == 1
    )


def test_a_drive_is_chosen_for_the_configurations_that_have_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drives = "drives: {x: {price: 1, capacity: 1GiB}}\nchoices: {cpu: [1GiB], drives: [none, x]}"
    (folder / "prices.yaml").write_text(f"per: hour\ngpus: {{fast: 1}}\ncpu_gib: 0\n{drives}\n")
    assert plan("slo.ttft_s=800ms", "drive=pm9a3", "plan.beyond=null") == 0
    assert outcomes(record()) == [(1.0, "fast", 1, "holds"), (2.0, "fast", 1, "holds")] and record()["slo"]["ttft_s"] == 0.8
    assert "drive=pm9a3 is left out in 1 of 2 jobs" in capsys.readouterr().out


def test_a_drive_of_the_catalogue_is_that_drive(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drives = "drives: {pm9a3: {price: 1, capacity: 1GiB}}\nchoices: {cpu: [1GiB], drives: [pm9a3]}"
    (folder / "prices.yaml").write_text(f"per: hour\ngpus: {{fast: 1}}\ncpu_gib: 0\n{drives}\n")
    assert plan() == 0
    config = json.loads(Path("out", "0", "result.json").read_text())["config"]
    assert config["hardware"]["disk_read_bytes_per_s"] == 6.5e9 and config["hardware"]["disk_latency_s"] == 1e-4
    assert plan("drive=micron_9550") == 2
    assert "drive: leave it out: prices.yaml chooses pm9a3" in capsys.readouterr().err


def test_a_host_has_no_more_gpus_than_the_file_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two engines of four GPUs on each host of four would be charged half of the CPU memory."""
    choices = "choices: {engines: [2], gpus_per_engine: [2, 4], cpu: [1GiB]}"
    (folder / "prices.yaml").write_text(f"per: hour\ngpus_per_host: 4\ngpus: {{fast: 1}}\ncpu_gib: 1\n{choices}\n")
    assert plan("cluster.engines_per_host=2") == 0
    found = record()
    assert outcomes(found) == [(5.0, "fast", 2, "holds"), (9.0, "fast", 2, "cannot run")]
    reason = "cluster.engines_per_host: 2 engines of 4 GPUs need 8 on a host, and gpus_per_host is 4"
    assert found["candidates"][1]["reason"] == reason


def test_settings_of_plan_have_no_effect_on_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "plan.beyond=1"]) == 2
    assert "plan.beyond has no effect on kvsim simulate" in capsys.readouterr().err


def test_stages_and_groups_of_experts_are_chosen_by_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = "choices: {gpus_per_engine: [4], pipeline_parallel: [1, 2, 3]}"
    (folder / "prices.yaml").write_text(f"per: hour\ngpus: {{h100: 1}}\n{choices}\n")
    assert plan("plan.beyond=null") == 0
    found = record()["candidates"]
    assert [(one["pipeline_parallel"], one["outcome"]) for one in found] == [(1, "holds"), (2, "holds"), (3, "cannot run")]
    assert "pipeline_parallel=3 does not divide gpus=4" in found[2]["reason"]
    shown = capsys.readouterr().out
    assert "1 x TP4" in shown and "1 x TP2 PP2" in shown
    assert plan("hardware.pipeline_parallel=2") == 2
    assert "prices.yaml chooses what costs money: set choices.pipeline_parallel there" in capsys.readouterr().err


def test_a_model_without_experts_has_no_use_for_groups_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prices.yaml").write_text("per: hour\ngpus: {h100: 1}\nchoices: {gpus_per_engine: [2], expert_parallel: [1, 2]}\n")
    assert plan("plan.beyond=null") == 2
    line = capsys.readouterr().err
    assert (
        line.startswith("kvsim: hardware.expert_parallel has no effect on a model without routed experts")
        and line.count("\n") == 1
    )
