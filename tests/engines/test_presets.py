"""What presets of SGLang and of Mooncake's paper choose, and what they refuse."""

import json
from pathlib import Path

import hydra
import pytest

import kvsim
from kvsim.cli import main
from kvsim.core.rules import Rules
from kvsim.engine.columns import hit_tokens
from kvsim.engines.sglang.hosted_nodes import HostedNodeCache
from kvsim.engines.sglang.rules import SGLangRules
from kvsim.engines.sglang.unified_nodes import UnifiedNodeCache
from kvsim.engines.sglang.whole_nodes import WholeNodeCache
from kvsim.errors import UsageError
from kvsim.plans.build import build_run
from kvsim.plans.plan import Plan
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.prefetch.adaptive import AdaptivePrefetch
from kvsim.run.assembly import build_setup
from kvsim.run.play import build_tiers, replay

TINY = {"timestamp": 0, "input_length": 1_500, "output_length": 10, "hash_ids": [0, 1, 2]}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text(json.dumps(TINY))


def plan(*overrides: str, command: str = "replay") -> Plan:
    with hydra.initialize_config_module("kvsim.conf", version_base="1.3"):
        cfg = hydra.compose("config", overrides=list(overrides))
    return build_run(cfg, command=command, overrides=overrides)


def problem(*overrides: str, command: str = "replay") -> str:
    with pytest.raises(UsageError) as error:
        plan(*overrides, command=command)
    return str(error.value)


def cache_of(built: Plan) -> object:
    return built.rules.server(build_setup(built, build_tiers(built), []))


def test_tiers_answers_and_the_version_choose_between_the_caches_of_sglang() -> None:
    old = "rules.version=0.5.15"
    assert type(cache_of(plan("preset=sglang", "rules.cache_output=true"))) is UnifiedNodeCache
    assert type(cache_of(plan("preset=sglang", "rules.cache_output=false"))) is WholeNodeCache
    assert type(cache_of(plan("preset=sglang_hicache"))) is UnifiedNodeCache
    assert type(cache_of(plan("preset=sglang", "tiers.cpu.capacity=10GiB"))) is UnifiedNodeCache
    assert type(cache_of(plan("preset=sglang_hicache", old))) is HostedNodeCache
    assert type(cache_of(plan("preset=sglang", "tiers.cpu.capacity=10GiB", old))) is HostedNodeCache
    assert cache_of(plan("rules=default")) is None


def test_policies_of_sglang_can_be_chosen() -> None:
    built = plan("preset=sglang_hicache", "eviction=slru", "placement=write_back")
    assert isinstance(built.tiers[0].eviction, SegmentedLRU)
    assert isinstance(built.tiers[1].placement, WriteBack)
    assert isinstance(plan("preset=sglang_hicache").tiers[1].placement, WriteThrough)


def test_settings_of_the_rules_reach_the_cache() -> None:
    settings = ("preset=sglang_hicache", "rules.load_min_tokens=77", "rules.recompute_last_token=false")
    for version, kind in (("0.5.15", HostedNodeCache), ("0.5.23", UnifiedNodeCache)):
        cache = cache_of(plan(*settings, f"rules.version={version}"))
        assert isinstance(cache, kind)
        assert (cache._load_min_tokens, cache._recompute_last_token) == (77, False)


def test_what_sglang_s_rules_do_not_simulate_is_said_in_the_result() -> None:
    stored = "tiers.disk.capacity=1TiB"
    for settings in ([], [stored], [stored, "rules.prefetch_counts=unmatched"]):
        built = plan("preset=sglang_hicache", *settings, command="simulate")
        assert isinstance(built.rules, SGLangRules) and built.rules_note == ""
    note = plan("preset=sglang_hicache", stored, "tiers.remote.capacity=1TiB", command="simulate").rules_note
    assert note == "kvsim's own: those of SGLang do not cover kvsim simulate with tiers gpu, cpu, disk, remote"
    built = plan("preset=sglang_hicache", "rules.version=0.5.15", command="simulate")
    assert built.rules == Rules(cache_output=False)
    assert built.rules_note == "kvsim's own: those of SGLang 0.5.15 do not cover kvsim simulate with tiers gpu, cpu"
    assert isinstance(plan("preset=sglang", command="simulate").rules, SGLangRules)
    assert plan("preset=sglang", command="simulate").rules_note == ""
    assert plan("preset=sglang", "rules=default", command="simulate").rules_note == ""
    assert plan("preset=sglang").rules_note == ""
    assert problem("preset=sglang_hicache", "rules.version=0.5.15", "rules.load_min_tokens=5", command="simulate") == (
        "rules.load_min_tokens has no effect on kvsim simulate with tiers gpu, cpu, which uses kvsim's own rules: leave it out"
    )


def test_settings_of_the_rules_are_checked() -> None:
    assert problem("preset=sglang_hicache", "rules.load_min_tokens=-1") == "rules.load_min_tokens must be 0 or more, not -1"
    assert problem("preset=sglang", "rules.load_min_tokens=5") == (
        "rules.load_min_tokens has no effect without a CPU tier: set tiers.cpu.capacity"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["rules.version=0.5.16"], "rules.version must be 0.5.23 or 0.5.15, not 0.5.16"),
        (["rules.version=0.5.15", "tiers.disk.capacity=1TiB"], "rules.version=0.5.15 has no disk tier: set tiers.disk"),
        (["rules.version=0.5.15", "rules.cache_output=true"], "rules.version=0.5.15 does not cache answers: set cache_output"),
        (["rules.version=0.5.15", "tiers.cpu.capacity=0"], "rules.version has no effect on kvsim replay without a CPU tier"),
        (["rules.version=0.5.15", "replay.copy_steps=1"], "rules: replay.copy_steps has no effect on version=0.5.15"),
        (["rules.prefetch_counts=all", "tiers.disk.capacity=1TiB"], "rules.prefetch_counts must be stored or unmatched, not all"),
        (["rules.prefetch_counts=unmatched"], "rules.prefetch_counts has no effect without a disk tier"),
        (["replay.copy_steps=1", "tiers.cpu.capacity=0"], "rules: replay.copy_steps has no effect without a CPU tier"),
        (["replay.copy_steps=1", "rules=default"], "replay.copy_steps has no effect under rules that count no steps"),
        (["replay.prefill_chunk_tokens=63"], "rules: replay.prefill_chunk_tokens=63 is less than page_tokens=64"),
        (["placement=exclusive"], "rules: SGLang's host keeps what it loads, which Exclusive does not"),
        (
            ["tiers.disk.capacity=1TiB", "prefetch=none", "tiers.disk.below=gpu", "tiers.cpu.capacity=0"],
            "rules: SGLang's storage is read into host memory: set tiers.cpu.capacity",
        ),
        (
            ["tiers.disk.capacity=1TiB", "prefetch=none", "tiers.disk.below=gpu"],
            "rules: SGLang's storage is read into host memory: set tiers.disk.below=cpu",
        ),
        (
            ["tiers.disk.capacity=1TiB", "placement@tiers.disk.placement=write_back"],
            "rules: SGLang's storage has whatever the host has, which WriteBack does not give it",
        ),
        (
            ["tiers.disk.capacity=1TiB", "eviction@tiers.disk.eviction=lfu"],
            "rules: SGLang leaves evictions to its storage, where pages used least recently leave first here, not by LFU",
        ),
    ],
)
def test_what_sglang_s_rules_do_not_have_ends_with_one_line(
    settings: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "preset=sglang_hicache", *settings]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kvsim: {words}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["tiers.disk.capacity=1TiB"], "its own CPU memory and storage: set cluster.engines_per_host=1"),
        (
            ["tiers.disk.capacity=1TiB", "tiers.cpu.scope=engine"],
            "its own CPU memory and storage: set cluster.engines_per_host=1",
        ),
        ([], "its own CPU memory: set tiers.cpu.scope=engine"),
    ],
)
def test_engines_of_sglang_share_nothing_in_a_simulation(
    settings: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "preset=sglang_hicache", "cluster.engines=2", "trace.sessions=3", *settings]) == 2
    assert capsys.readouterr().err == (
        f"kvsim: rules: an engine of SGLang has {words}, or set rules=default for kvsim's own rules with the same policies\n"
    )


@pytest.mark.parametrize("preset", ["sglang", "sglang_hicache", "vllm"])
def test_presets_cache_answers_if_the_trace_has_their_tokens(preset: str) -> None:
    """The answer to a prompt of two pages fills a third, which the next prompt contains."""
    line = {"timestamp": 0, "input_length": 1_024, "output_length": 600, "hash_ids": [0, 1], "output_hash_ids": [2]}
    later = {"timestamp": 0, "input_length": 1_600, "output_length": 1, "hash_ids": [0, 1, 2, 3], "output_hash_ids": []}
    Path("known.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(later)}")
    known, unknown = (kvsim.load_trace("mooncake", path=f"{name}.jsonl", page_tokens=512) for name in ("known", "trace"))
    for trace, settings, hits, is_cached in (
        (known, [], 3, True),
        (known, ["rules.cache_output=false"], 2, False),
        (known, ["replay.hold_output=false"], 2, False),
        (unknown, [], 0, False),
    ):
        result = kvsim.replay(trace, f"preset={preset}", *settings)
        assert result.hit_pages[-1][0] == hits
        assert result.record["config"]["rules"]["cache_output"] is is_cached
    with pytest.raises(UsageError, match=r"rules\.cache_output: the trace does not contain output tokens"):
        kvsim.replay(unknown, f"preset={preset}", "rules.cache_output=true")


@pytest.mark.parametrize(
    ("placement", "words"),
    [
        (
            "placement=by_length",
            "rules: SGLang's rules copy node by node, but ByLength decides about whole prompts: choose write_through",
        ),
        ("placement=write_back", "rules: SGLang's rules never write pages back before they are evicted: set the watermark to 0"),
    ],
)
def test_placements_that_sglang_has_not_are_refused(placement: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    early = ["placement.watermark=0.5"] if "back" in placement else []
    assert main(["replay", "preset=sglang_hicache", placement, *early, "trace.sessions=3"]) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: {words}")


def test_storage_is_read_ahead_as_in_sglang() -> None:
    built = plan("preset=sglang_hicache", "tiers.disk.capacity=1TiB", "placement=write_back", "eviction=slru")
    assert isinstance(built.tiers[2].placement, WriteThrough) and isinstance(built.tiers[2].eviction, LRU)
    assert isinstance(built.prefetch, AdaptivePrefetch)
    prefetch = built.prefetch
    assert (prefetch.min_tokens, prefetch.in_flight_fraction, prefetch.stop) == (256, 0.5, "timeout")
    assert prefetch.wait_s(4_096) == 2.0


@pytest.mark.long
def test_mooncake_s_paper_hits_what_lru_hits_of_the_released_ids(shared: Path) -> None:
    path = shared / "traces" / "mooncake_conversation_trace.jsonl.gz"
    requests = None
    for millions, hit_rate in ((1, 0.0543), (2, 0.0865), (4, 0.1783), (5, 0.2110), (8, 0.2663), (10, 0.2908), (50, 0.3707)):
        built = plan("preset=mooncake_paper", f"trace.path={path}", f"tiers.gpu.capacity={millions}000000tokens")
        requests = requests or built.trace.load(built.page_tokens).requests
        hits = hit_tokens(replay(built, requests)).sum() / sum(request.prompt_tokens for request in requests)
        assert hits == pytest.approx(hit_rate, abs=2e-4), millions


def test_the_tutorial_shows_the_tree_after_each_step(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots and nodes are those that the notebook prints for its two requests."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["replay", "preset=radix_tutorial", "output=run"]) == 0
    trees = [tree.splitlines() for tree in capsys.readouterr().out.split("\n\n")[:6]]
    assert [tree[0].split(": ")[0] for tree in trees] == [
        "radix tree, request 0 runs, 0 of its 6 pages hit",
        "radix tree, request 0 has finished",
        "radix tree, request 1 runs, 4 of its 6 pages hit",
        "radix tree, request 1 has finished",
        "radix tree, request 2 runs, 0 of its 3 pages hit",
        "radix tree, request 2 has finished",
    ]
    assert trees[1][1:] == ["└── 1 3 6 7 9 77  6 pages, 1 hit  gpu slots 0-5, leaf"]
    assert trees[3][1:] == [
        "└── 1 3 6 7  4 pages, 2 hits  gpu slots 0-3",
        "    ├── 9 77  2 pages, 1 hit  gpu slots 4-5, leaf",
        "    └── 87 66  2 pages, 1 hit  gpu slots 6-7, leaf",
    ]
    assert trees[5][1:] == [
        "├── 1 3 6 7  4 pages, 2 hits  gpu slots 0-3, leaf",
        "└── 2 4 5  3 pages, 1 hit  gpu slots 6-7, 4, leaf",
    ]
    assert json.loads(Path("run/result.json").read_text())["hit_pages"] == {"gpu": 4, "cpu": 0, "disk": 0}


def test_the_tutorial_shows_other_rules_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Page by page, three pages leave instead of two nodes: one of the more recent leaf stays."""
    assert main(["replay", "preset=radix_tutorial", "rules=default", "output=run"]) == 0
    last = capsys.readouterr().out.split("\n\n")[5]
    assert "87  1 page, 1 hit" in last and "77" not in last


@pytest.mark.parametrize("rules", ["default", "vllm", "fastdeploy", "lightllm"])
def test_every_cache_can_be_shown_step_by_step(rules: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("trace=words", "trace.prompts=[a b c d,a b e f,a b c d e f g,a b]", "page_tokens=1", "tiers.gpu.capacity=6pages")
    assert main(["replay", *settings, f"rules={rules}", "print_tree=each", "replay.in_flight=2", "output=run"]) == 0
    shown = [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("radix tree, ")]
    served = [number for number in range(4) if any(line.startswith(f"radix tree, request {number} runs") for line in shown)]
    assert served == [0, 1, 3]
    assert all(f"radix tree, request {number} has finished" in shown for number in served)
    assert "radix tree, no room for request 2" in shown


def test_a_tree_is_printed_at_the_end_or_after_each_step_or_not_at_all() -> None:
    assert problem("print_tree=sometimes") == "print_tree must be false, true or each, not sometimes"


def test_a_tree_does_not_change_the_hits() -> None:
    records = []
    for tree in ("each", "true", "false"):
        for rules in ("sglang", "default"):
            setting = (f"print_tree={tree}", f"rules={rules}", "replay.in_flight=1", f"output={tree}{rules}")
            assert main(["replay", "preset=radix_tutorial", *setting]) == 0
            records.append(json.loads(Path(f"{tree}{rules}/result.json").read_text())["hit_pages"])
    assert records[:2] == records[2:4] == records[4:]


def test_a_tree_is_printed_only_if_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "eviction=belady", "trace.sessions=3", "tiers.gpu.capacity=9000pages", "print_tree=true"]) == 2
    assert capsys.readouterr().err == "kvsim: print_tree has no effect on Belady, which has no tree: leave it out\n"


def test_a_tree_is_printed_by_a_replay_with_numbered_slots() -> None:
    assert problem("print_tree=true", command="simulate") == "print_tree has no effect on kvsim simulate: leave it out"
    assert problem("print_tree=true", "tiers.gpu.capacity=unlimited") == (
        "print_tree numbers every slot, but tiers.gpu.capacity is unlimited: set it to at most 10,000,000 pages"
    )
    assert problem("print_tree=true", "tiers.gpu.capacity=20000000pages") == (
        "print_tree numbers every slot, but tiers.gpu.capacity is 20,000,000 pages: set it to at most 10,000,000 pages"
    )
