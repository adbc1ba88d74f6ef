"""kvsim from Python does what the commands do."""

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import kvsim
from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.plans.arguments import override
from kvsim.policies.checkpoint.last import Last
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.routing.least_loaded import LeastLoaded
from kvsim.trace.base import Trace

SMALL = ("tiers.gpu.capacity=8000pages", "tiers.cpu.capacity=20000pages")


@pytest.fixture(scope="module")
def trace() -> Trace:
    return kvsim.load_trace("synthetic", sessions=25, page_tokens=16)


def test_public_names() -> None:
    assert sorted(kvsim.__all__) == [
        "Curve", "Leaderboard", "Purchase", "Report", "Result", "Saturation", "Sweep", "Trace", "Validation", "curve",
        "leaderboard", "load_trace", "plan", "replay", "report", "saturate", "simulate", "sweep", "trace_from_tokens", "validate",
    ]  # fmt: skip
    assert dir(kvsim) == sorted([*kvsim.__all__, "__version__"])
    assert all(hasattr(kvsim, name) for name in kvsim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvsim.nothing
    with pytest.raises(AttributeError, match="did you mean simulate"):
        _ = kvsim.simulat


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_run_gives_what_the_command_writes(trace: Trace, command: str, tmp_path: Path) -> None:
    result = getattr(kvsim, command)(trace, *SMALL, "eviction=slru", "placement=write_back")
    settings = ["trace=synthetic", "trace.sessions=25", *SMALL, "eviction=slru", "placement=write_back", f"output={tmp_path}"]
    assert main([command, *settings]) == 0
    written = json.loads((tmp_path / "result.json").read_text())
    times = {"load_s", "wall_s", "requests_per_s", "versions", "command_line"}
    assert {k: v for k, v in written.items() if k not in times} == {k: v for k, v in result.record.items() if k not in times}
    assert result.hit_rate == written["hit_rate"] > 0
    assert result.hit_pages[:, 0].sum() == written["hit_pages"]["gpu"]
    assert result.page_hit_rate == written["page_hit_rate"]


@pytest.mark.parametrize("name", ["synthetic", "trace=synthetic"])
def test_a_trace_may_be_named_as_a_choice(name: str) -> None:
    result = kvsim.replay(name, "trace.sessions=5", "tiers.gpu.capacity=600pages")
    loaded = kvsim.replay(kvsim.load_trace("synthetic", sessions=5), "tiers.gpu.capacity=600pages")
    assert result.hit_rate == loaded.hit_rate > 0
    with pytest.raises(UsageError, match="trace=nothing: there is no such choice"):
        kvsim.replay("nothing", "tiers.gpu.capacity=600pages")


def test_a_policy_may_be_an_object(trace: Trace) -> None:
    named = kvsim.replay(trace, *SMALL, "eviction=slru", "eviction.protected_hits=3", "placement=write_back")
    passed = kvsim.replay(trace, *SMALL, eviction=SegmentedLRU(protected_hits=3), placement=WriteBack())
    assert (named.hit_pages == passed.hit_pages).all()
    assert passed.record["config"]["eviction"]["protected_hits"] == 3
    assert passed.record["config_hash"] == named.record["config_hash"], "the configuration says all about the object"


def test_runs_do_not_share_a_policy_object(trace: Trace) -> None:
    policy = SegmentedLRU()
    first, second = (kvsim.replay(trace, *SMALL, eviction=policy) for _ in range(2))
    assert (first.hit_pages == second.hit_pages).all()
    assert not hasattr(policy, "heap")


def test_a_run_can_be_written(trace: Trace, tmp_path: Path) -> None:
    result = kvsim.replay(trace, *SMALL)
    result.write(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text()) == result.record
    assert (tmp_path / "run" / "requests.csv.gz").exists() and (tmp_path / "run" / "report.html").exists()


def test_a_curve_takes_a_single_capacity_and_policy(trace: Trace) -> None:
    one: Any = kvsim.curve(trace, capacities="5000pages", policies="fifo")  # type: ignore[arg-type]
    several = kvsim.curve(trace, capacities=["5000pages"], policies=["fifo"])
    assert one == several


def test_a_curve_is_drawn_from_python(trace: Trace) -> None:
    drawn = kvsim.curve(trace, capacities=[2000, "64000tokens"], policies=["fifo"])
    assert [(point.policy, point.capacity_pages) for point in drawn.points] == [
        (policy, pages) for policy in ("lru", "fifo", "belady") for pages in (2000, 4000)
    ]
    replayed = kvsim.replay(trace, "tiers.gpu.capacity=4000pages", "eviction=fifo", "replay.hold_output=false")
    assert drawn.points[3].hit_rate == replayed.hit_rate
    importlib.import_module("kvsim.run.curves")
    assert callable(kvsim.curve), "the module of curves does not hide the function"
    with pytest.raises(UsageError, match=r"curve\.fraction|fraction must be"):
        kvsim.curve(trace, fraction=0)
    with pytest.raises(UsageError, match=r"tiers\.gpu\.capacity has no effect on kvsim curve"):
        kvsim.curve(trace, "tiers.gpu.capacity=3000pages")


def test_what_is_returned_is_one_line_at_a_prompt_and_a_table_in_a_notebook(trace: Trace) -> None:
    result = kvsim.simulate(trace, *SMALL)
    drawn = kvsim.curve(trace, capacities=[2000, 4000])
    for value, words in (
        (trace, "Trace(synthetic: "), (result, "Result(simulate trace=synthetic model=llama3_8b eviction=lru, gpu 8,000 pages"),
        (drawn, "Curve(lru, belady: 2,000 to 4,000 pages of 16 tokens"),
    ):  # fmt: skip
        assert repr(value).startswith(words) and "\n" not in repr(value) and len(repr(value)) < 200
        assert "<table>" in value._repr_html_()
    assert f"{result.record['ttft_s']['p99']:.3f}"[:4] in repr(result)


def test_tables_have_the_columns_of_the_files(trace: Trace, tmp_path: Path) -> None:
    result = kvsim.simulate(trace, *SMALL)
    result.write(tmp_path)
    header = gzip.decompress((tmp_path / "requests.csv.gz").read_bytes()).decode().splitlines()[0]
    requests = result.requests
    assert list(requests) == header.split(",") and len(requests) == len(trace.requests)
    assert requests["hit_tokens_gpu"].dtype.kind == "i" and requests["ttft_s"].dtype.kind == "f"
    assert requests["ttft_s"].tolist() == pytest.approx(result.outcome.ttft_s.tolist())
    drawn = kvsim.curve(trace, capacities=[2000, 4000])
    assert drawn.table["hit_rate"].tolist() == [point.hit_rate for point in drawn.points]


def test_pictures_are_figures(trace: Trace) -> None:
    result = kvsim.simulate(trace, *SMALL)
    assert [line.name for line in result.plot().data] == ["gpu", "cpu"]
    assert result.plot("time to first token").layout.xaxis.title.text == "time to first token"
    assert [line.name for line in kvsim.curve(trace, capacities=[9000]).plot().data] == ["lru", "belady"]
    with pytest.raises(UsageError, match="no picture 'Link usee'; did you mean Link use"):
        result.plot("Link usee")


def test_settings_may_be_names_keywords_and_mappings(trace: Trace, tmp_path: Path) -> None:
    words = ("tiers.gpu.capacity=6000pages", "eviction=slru", "model=tiny", "rules.cache_output=true", "seed=3")
    named = kvsim.replay(trace, *words)
    keywords = kvsim.replay(
        trace, {"tiers.gpu.capacity": "6000pages"}, eviction="slru", model="tiny", rules={"cache_output": True}, seed=3
    )
    nested = kvsim.replay(trace, words[1], *words[2:], tiers={"gpu": {"capacity": "6000pages"}}, output=tmp_path / "a folder")
    assert named.record["config_hash"] == keywords.record["config_hash"] == nested.record["config_hash"]
    assert json.loads((tmp_path / "a folder" / "result.json").read_text())["hit_rate"] == named.hit_rate
    for value in ("it's", "null", "1e5", "a,b=c", True, None, [1, "x y"], {"a": 1.5}, 0.1):
        config = OmegaConf.create({"key": None})
        parsed = OverridesParser.create().parse_overrides([override("key", value)])[0]
        config.key = parsed.value()
        assert config.key == value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advnce": print}, "advnce=<built-in function print>: not a value of a setting"),
        ({"checkpoint": "last"}, "checkpoint has no effect on a model without recurrent layers"),
        ({"placement": WriteBack()}, "placement has no effect without a lower tier"),
        ({"eviction": WriteBack()}, "WriteBack is a policy of the family placement"),
        ({"eviction": LRU}, r"pass an object, LRU\(\.\.\.\)"),
        ({"scheduling": "fcfs"}, "scheduling has no effect on kvsim replay"),
        ({"logger": "none"}, "logger: only runs with an output folder are logged"),
    ],
)
def test_mistakes_in_keywords_are_one_line(trace: Trace, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kvsim.replay(trace, "tiers.gpu.capacity=6000pages", **settings)


def test_policies_of_a_tier_and_of_all_families_may_be_objects(trace: Trace) -> None:
    mixed = kvsim.replay(trace, *SMALL, {"eviction@tiers.cpu.eviction": FIFO()}, eviction=SegmentedLRU())
    named = kvsim.replay(trace, *SMALL, "eviction@tiers.cpu.eviction=fifo", eviction="slru")
    assert (mixed.hit_pages == named.hit_pages).all()
    assert mixed.record["choices"]["eviction@tiers.cpu.eviction"] == "FIFO"
    two = ("cluster.engines=2", "tiers.gpu.capacity=6000pages")
    routed = [kvsim.simulate(trace, *two, routing=routing) for routing in ("least_loaded", LeastLoaded())]
    assert (routed[0].hit_pages == routed[1].hit_pages).all()
    hybrid = {"model": "qwen3_next_80b", "tiers.gpu.capacity": "40GiB"}
    saved = [kvsim.replay(trace, hybrid, checkpoint=checkpoint) for checkpoint in ("last", Last())]
    assert saved[0].record["checkpoints"] == saved[1].record["checkpoints"] and saved[0].hit_rate > 0


def test_mistakes_are_usage_errors(trace: Trace) -> None:
    with pytest.raises(UsageError, match="the trace is already loaded"):
        kvsim.replay(trace, "trace.limit=3")
    with pytest.raises(UsageError, match=r"trace\.sesions: there is no such setting"):
        kvsim.load_trace("synthetic", sesions=3)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        kvsim.load_trace("mooncake", path="no such file.jsonl")
