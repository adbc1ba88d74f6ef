"""The numbers of a result as attributes."""

import pickle

import pytest

import kvsim
from kvsim.results.attributes import QUANTILES, attributes_of

TIMES = ("ttft", "tpot", "e2e", "queue", "load", "prefill")


@pytest.fixture(scope="module")
def result() -> kvsim.Result:
    trace = kvsim.load_trace("synthetic", sessions=20)
    return kvsim.simulate(trace, "tiers.gpu.capacity=8000pages", "tiers.cpu.capacity=9000pages", "slo.ttft_s=1")


def test_every_quantile_has_the_name_of_its_column_and_a_short_one(result: kvsim.Result) -> None:
    record = result.record
    spreads = {name: record[f"{name}_s"] if name in TIMES[:3] else record["phases_s"][name] for name in TIMES}
    for name, spread in spreads.items():
        for quantile in QUANTILES:
            assert getattr(result, f"{name}_{quantile}") == getattr(result, f"{name}_s_{quantile}") == spread[quantile]


def test_measures_and_fields_are_attributes(result: kvsim.Result) -> None:
    record = result.record
    assert result.goodput == result.goodput_requests_per_s == record["slo"]["goodput_requests_per_s"] > 0
    assert result.attainment == result.slo_attainment == record["slo"]["attainment"]
    assert result.hit_rate_cpu == record["hit_tokens"]["cpu"] / record["prompt_tokens"]
    assert result.hit_rate == pytest.approx(sum(getattr(result, f"hit_rate_{tier}") for tier in record["tiers"]))
    assert result.throughput_requests_per_s == record["throughput"]["requests_per_s"]
    assert result.tiers == record["tiers"] and result.diagnosis["bottleneck"]


def test_what_the_result_does_not_have_is_none() -> None:
    replayed = kvsim.replay(kvsim.load_trace("synthetic", sessions=5))
    assert replayed.ttft_p99 is None and replayed.goodput is None and replayed.hit_rate > 0
    assert replayed.parallel is None and "parallel" not in replayed.record and "parallel" in dir(replayed)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("ttft_p9", "; did you mean ttft_p90 or ttft_p99?"),
        ("hitrate", "; did you mean hit_rate?"),
        ("godput", "; did you mean goodput?"),
        ("zzz", ""),
    ],
)
def test_a_misspelled_name_is_told(result: kvsim.Result, wrong: str, hint: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(result, wrong)
    assert str(error.value) == f"'Result' object has no attribute '{wrong}'{hint}"


def test_the_speed_of_kvsim_is_not_taken_for_that_of_the_server(result: kvsim.Result) -> None:
    with pytest.raises(AttributeError, match=r"did you mean goodput_requests_per_s, .*throughput_requests_per_s"):
        _ = result.requests_per_s


def test_a_prompt_completes_the_names(result: kvsim.Result) -> None:
    names = dir(result)
    assert {"ttft_p99", "hit_rate_gpu", "goodput", "plot", "record"} <= set(names) and names == sorted(names)
    assert all(hasattr(result, name) for name in attributes_of(result.record))


def test_runs_of_a_sweep_have_them_too_and_survive_pickle() -> None:
    swept = kvsim.sweep(kvsim.load_trace("synthetic", sessions=5), {"seed": [0]}, command="simulate")
    again = pickle.loads(pickle.dumps(swept[0]))
    assert again.ttft_p99 == swept[0].ttft_p99 == swept[0].record["ttft_s"]["p99"]
