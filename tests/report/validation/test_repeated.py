"""Several real runs against several simulations: verdicts small enough to check by hand, and those on a machine that is known."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvsim.errors import UsageError
from kvsim.report.folder import write_run
from kvsim.report.validation.recording import Recording, read_measured, read_recording, recorded
from kvsim.report.validation.repeated_page import print_repeated, render_repeated, repeated_failures
from kvsim.report.validation.spreads import distance_of_means
from kvsim.report.validation.step_table import step_table
from kvsim.report.validation.validation import write_validation
from tests.report.fake_machine import figures, play, real, validated
from tests.report.test_html import Page
from tests.report.validation.test_validation import CONFIG, HITS, as_recorded, played

NOISY: dict[str, Any] = CONFIG | {"hardware": {"gpus": 1, "noise": {"seed": 0}}}


def run(ttft_s: list[float], *, hits: list[tuple[int, int, int]] = HITS, n_bytes: int = 1000, **config: Any) -> Recording:
    settings = NOISY | {"substrate": "simulated"} | config
    return as_recorded(played(hits, ttft_s, n_bytes, substrate=settings["substrate"]), settings)


def measured(ttft_s: list[float], **about: Any) -> Recording:
    return run(ttft_s, substrate="hardware", **about)


def times(first: float) -> list[float]:
    """The median is a second later."""
    return [first, first + 1, first + 1, first + 2]


SIMULATED = [run(times(first)) for first in (9.0, 10.0, 11.0)]


def test_within_the_spread_tolerances_do_not_count() -> None:
    """Medians 10, 11, 12 against 11, 13: 8 % apart."""
    record = validated(SIMULATED, [measured(times(10.0)), measured(times(12.0))])
    median = figures(record)["ttft_p50"]
    logs = distance_of_means(*(np.log(values).tolist() for values in ([10, 11, 12], [11, 13])))
    assert (median["simulated"]["mean"], median["hardware"]["mean"]) == (11, 12)
    assert median["distance"] == pytest.approx((10 * 11 * 12) ** (1 / 3) / (11 * 13) ** 0.5 - 1)
    assert (median["low"], median["high"]) == pytest.approx((np.expm1(logs.low), np.expm1(logs.high)))
    assert (median["simulated"]["deviation"], median["hardware"]["least"], median["hardware"]["most"]) == (1, 11, 13)
    assert (median["is_off"], median["tolerance"], median["holds"]) == (False, 0.05, True)
    assert record["off"] == 0 and record["holds"] and repeated_failures(record) == ""


def test_what_is_off_must_be_within_its_tolerance() -> None:
    """A hundred seconds later, all runs; links carry a tenth more, hits are the same."""
    record = validated(SIMULATED, [measured(times(110.0 + more), n_bytes=1100) for more in (0.0, 1.0)])
    found = figures(record)
    assert {name for name, figure in found.items() if figure["is_off"]} == {
        "ttft_p50", "ttft_p90", "ttft_p99", "link_bytes cpu-gpu", "ttft by request",
    }  # fmt: skip
    assert {name for name, figure in found.items() if not figure["holds"]} == {"ttft_p50", "ttft_p99", "link_bytes cpu-gpu"}
    assert "link_bytes cpu-gpu is off by -9.1% (tolerance 0.01)" in repeated_failures(record) and not record["holds"]
    wide = validated(SIMULATED, [measured(times(110.0), n_bytes=1100)] * 2, ttft_p50=1, ttft_p99=1, link_bytes=0.1)
    assert wide["holds"] and wide["off"] == 5


def test_a_link_that_only_the_simulations_use_is_off() -> None:
    record = validated(SIMULATED, [measured(times(10.0), n_bytes=0)] * 2)
    found = figures(record)["link_bytes cpu-gpu"]
    assert (found["distance"], found["is_off"], found["holds"]) == (None, True, False)
    assert "link_bytes cpu-gpu is off by - (tolerance 0.01)" in repeated_failures(record)
    used_once = validated(SIMULATED, [measured(times(10.0), n_bytes=n_bytes) for n_bytes in (0, 1000, 2000)])
    found = figures(used_once)["link_bytes cpu-gpu"]
    assert (found["distance"], found["is_off"]) == (0, False) and found["low"] == -found["high"] < 0


def test_hits_are_compared_with_how_much_real_runs_agree() -> None:
    """Real runs agree in three of four requests with each other; simulations do so, too, or in two."""
    others = [[(4, 0, 0), *HITS[1:]], [(5, 0, 0), *HITS[1:]], [(6, 0, 0), *HITS[1:]]]
    real_runs = [measured(times(10.0), hits=hits) for hits in others]
    found = figures(validated([run(times(10.0))] * 3, real_runs))["identical hits"]
    assert (found["simulated"]["mean"], found["hardware"]["mean"], found["is_off"]) == (0.75, 0.75, False)
    changed = [HITS[0], (4, 0, 0), *HITS[2:]]
    found = figures(validated([run(times(10.0), hits=changed)] * 3, real_runs))["identical hits"]
    assert (found["distance"], found["is_off"], found["holds"]) == (-0.25, True, False)
    assert figures(validated([run(times(10.0), hits=changed)] * 3, real_runs, identical=0.5))["identical hits"]["holds"]


def test_the_record_and_the_page_say_what_was_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = validated(SIMULATED, [measured(times(110.0)), measured(times(111.0))])
    write_validation(tmp_path, record, render_repeated(record))
    assert json.loads((tmp_path / "validate.json").read_text()) == record
    page = (tmp_path / "validate.html").read_text()
    assert "Time to first token by request" in page and "relative to the mean of the real runs" in page
    assert not {name for name, _ in Page(page).attributes} & {"src", "href", "srcset", "action"}
    print_repeated(record, Console(width=100))
    shown = capsys.readouterr().out
    assert "3 simulations and 2 runs on an NVIDIA H200; 18 reused pages verified." in shown
    assert "4 of 13 figures are off; about 1 would be by chance." in shown
    assert "95% interval" in shown and "off, FAILS" in shown
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_steps_of_real_runs_are_shown_beside_what_was_expected_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs, each with 3 steps with prefill of up to 128 tokens, 1 with more, and 2 single decode steps; a third has none."""
    rows = [
        {"kind": "decode", "least": 1, "leaps": 2, "steps": 2, "measured_s": 0.02, "expected_s": 0.01},
        {"kind": "prefill", "least": 1, "leaps": 3, "steps": 3, "measured_s": 0.03, "expected_s": 0.033},
        {"kind": "prefill", "least": 513, "leaps": 1, "steps": 1, "measured_s": 0.25, "expected_s": 0.25},
    ]
    found = step_table([{"steps": rows}, {"steps": rows}, {}])
    assert found.rows == [
        ("prefill, 1 to 512 tokens", "6", "11", "10", "+10.0%"),
        ("prefill, 513 or more tokens", "2", "250", "250", "+0.0%"),
        ("decoding, 1 or more steps", "4", "5", "10", "-50.0%"),
    ]
    assert not step_table([{}, {}]).rows
    record = validated(SIMULATED, [measured(times(10.0))] * 2)
    record["hardware"][0]["steps"] = rows
    print_repeated(record, Console(width=100))
    assert "Steps that did not wait for loads (mean ms)" in capsys.readouterr().out
    assert "513 or more tokens" in render_repeated(record)


def test_a_machine_without_noise_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    silent = {"hardware": {"gpus": 1, "noise": None}}
    record = validated([run(times(10.0), **silent)], [measured(times(first), **silent) for first in (9.0, 10.0)])
    print_repeated(record, Console(width=100))
    assert "1 simulation and 2 runs" in (shown := capsys.readouterr().out)
    assert "The machine has no measured noise, so all simulations are equal" in shown


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (measured(times(9.0), page_tokens=20), "differ in page_tokens"),
        (measured(times(9.0), hardware={"gpus": 2}), "differ in hardware: only"),
    ],
)
def test_runs_of_another_configuration_are_refused(other: Recording, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        validated(SIMULATED, [measured(times(9.0)), other])


def test_recorded_runs_are_found_in_and_below_folders(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        outcome = played(HITS, times(number), 1000, substrate="hardware")
        write_run(tmp_path / "hardware" / str(number), measured(times(number)).record, outcome)
    write_run(tmp_path / "simulated", run(times(5.0)).record, played(HITS, times(5.0), 1000, substrate="simulated"))
    found = read_measured([str(tmp_path), str(tmp_path / "hardware" / "2")])
    assert [Path(one.name).name for one in found] == ["1", "2", "10"]
    assert found[1].ttft_s.tolist() == times(2) and found[1].hit_pages.tolist() == [list(row) for row in HITS]
    made = recorded("", found[1].record, played(HITS, times(2), 1000, substrate="hardware"))
    assert all((made.columns[name] == found[1].columns[name]).all() for name in ("status", "prompt_pages", "ttft_s"))
    with pytest.raises(UsageError, match=r"simulated has no run on hardware"):
        read_measured([str(tmp_path / "simulated")])
    with pytest.raises(UsageError, match="there is no folder"):
        read_measured([str(tmp_path / "nowhere")])


@pytest.mark.parametrize(("text", "problem"), [("request\n0\n1\n2\n3\n", "prompt_pages is missing"), ("", "not the requests")])
def test_a_broken_recording_is_named(text: str, problem: str, tmp_path: Path) -> None:
    write_run(tmp_path, measured(times(1.0)).record, played(HITS, times(1.0), 1000, substrate="hardware"))
    (tmp_path / "requests.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UsageError, match=problem):
        read_recording(tmp_path)


def test_a_machine_that_is_as_described_is_within_its_spread_and_a_slower_one_is_off() -> None:
    simulated = [play(seed) for seed in range(6)]
    same = validated(simulated, [real(100 + seed) for seed in range(3)])
    assert same["off"] <= 2 and not figures(same)["tpot_p50"]["is_off"]
    other = figures(validated(simulated, [real(100 + seed, step_overhead_s=2e-3) for seed in range(3)]))
    assert other["tpot_p50"]["is_off"] and other["tpot_p50"]["distance"] < -0.1


@pytest.mark.long
def test_false_alarms_and_power() -> None:
    """Of 100 validations with three real runs each, on a machine that is as described and on others."""
    drawn = random.Random(1)
    simulated = [play(seed) for seed in range(60)]

    def off(**machine: Any) -> dict[str, float]:
        """Share of the validations in which each figure is off, and in which some figure fails."""
        pool = [real(1000 + seed, **machine) for seed in range(40)]
        records = [validated(drawn.sample(simulated, 20), drawn.sample(pool, 3)) for _ in range(100)]
        shares = {name: sum(figures(record)[name]["is_off"] for record in records) / 100 for name in figures(records[0])}
        return shares | {"fails": sum(not record["holds"] for record in records) / 100}

    as_described = off()
    fails = as_described.pop("fails")
    assert sum(as_described.values()) / len(as_described) < 0.06 and max(as_described.values()) < 0.15 and fails < 0.25
    slow_disk = off(disk_curves=None, disk_read_bytes_per_s=1.2e9, disk_write_bytes_per_s=1.3e9)
    assert slow_disk["link_busy cpu-disk"] > 0.6 and slow_disk["fails"] > 0.6
    slow_steps = off(step_overhead_s=1e-3)
    assert slow_steps["tpot_p50"] > 0.9 and slow_steps["fails"] > 0.7
