"""From a composed configuration to the objects of a run."""

import os
from pathlib import Path

import hydra.utils
import pytest
from omegaconf import OmegaConf, open_dict

from kvsim.cli import main
from kvsim.errors import UsageError
from kvsim.plans.build import build_run, check_output
from kvsim.policies.eviction.fifo import FIFO
from kvsim.policies.eviction.lru import LRU
from kvsim.policies.eviction.slru import SegmentedLRU
from kvsim.policies.placement.write_back import WriteBack
from kvsim.policies.placement.write_through import WriteThrough
from kvsim.policies.placement.write_through_selective import WriteThroughSelective
from kvsim.replaying.settings import ReplaySettings
from tests.composing import composed, plan

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
THREE_TIERS = ("tiers.cpu.capacity=100pages", "tiers.disk.capacity=200pages")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problem(*overrides: str, command: str = "replay") -> str:
    with pytest.raises(UsageError) as error:
        plan(*overrides, command=command)
    return str(error.value)


def test_a_run_has_one_gpu_tier_unless_told_otherwise() -> None:
    (gpu,) = plan("tiers.gpu.capacity=60pages").tiers
    assert (gpu.name, gpu.capacity_pages, gpu.placement) == ("gpu", 60, None)


def test_bytes_are_those_of_the_model() -> None:
    assert plan("tiers.gpu.capacity=1GiB", "page_tokens=16").tiers[0].capacity_pages == 512
    assert plan("tiers.gpu.capacity=1GiB", "page_tokens=16", "model.kv_dtype_bytes=1").tiers[0].capacity_pages == 1024


def test_one_policy_serves_all_tiers_in_separate_instances() -> None:
    gpu, cpu, disk = plan(*THREE_TIERS, "eviction=slru", "eviction.protected_hits=3").tiers
    assert [tier.eviction.protected_hits for tier in (gpu, cpu, disk)] == [3, 3, 3]  # type: ignore[attr-defined]
    assert gpu.eviction is not cpu.eviction


def test_a_tier_may_have_its_own_eviction_policy() -> None:
    own = ("eviction@tiers.cpu.eviction=slru", "tiers.cpu.eviction.protected_hits=4")
    gpu, cpu, disk = plan(*THREE_TIERS, "eviction=fifo", *own).tiers
    assert isinstance(gpu.eviction, FIFO)
    assert isinstance(cpu.eviction, SegmentedLRU)
    assert cpu.eviction.protected_hits == 4
    assert isinstance(disk.eviction, FIFO)


def test_an_edge_may_have_its_own_placement_policy() -> None:
    gpu, cpu, disk = plan(*THREE_TIERS, "placement=write_back", "placement@tiers.disk.placement=write_through_selective").tiers
    assert gpu.placement is None
    assert isinstance(cpu.placement, WriteBack)
    assert isinstance(disk.placement, WriteThroughSelective)


def test_defaults_are_lru_and_write_through() -> None:
    _, cpu = plan("tiers.cpu.capacity=unlimited").tiers
    assert isinstance(cpu.eviction, LRU)
    assert isinstance(cpu.placement, WriteThrough)
    assert cpu.capacity_pages is None


def test_settings_reach_their_objects() -> None:
    built = plan("rules.recompute_last_token=false", "replay.in_flight=4", "replay.hold_output=false", "warmup=0.5", "seed=7")
    assert not built.rules.recompute_last_token
    assert (built.replay.in_flight, built.replay.hold_output) == (4, False)
    assert (built.warmup, built.seed) == (0.5, 7)


def test_prompts_are_computed_in_chunks_of_8192_tokens_unless_told_otherwise() -> None:
    assert plan().replay.chunk_tokens == 8_192
    assert ReplaySettings(prefill_chunk_tokens=0).chunk_tokens == 0
    assert ReplaySettings(prefill_chunk_tokens=512).chunk_tokens == 512


HARDWARE = ("substrate=hardware", "tiers.gpu.capacity=60pages")
STRAIGHT = ("tiers.disk.capacity=10pages", "tiers.disk.below=gpu")


def test_real_hardware_has_settings_of_its_own() -> None:
    built = plan(*HARDWARE, *THREE_TIERS, "disk.folder=pages", "disk.threads=2", command="simulate")
    assert (built.substrate, built.disk.path, built.disk.threads) == ("hardware", Path("pages"), 2)
    assert plan(*HARDWARE, command="simulate").disk.path is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["disk.threads=2", *THREE_TIERS], "disk.threads has no effect on substrate=simulated"),
        ([*HARDWARE, "disk.folder=pages"], "disk.folder has no effect without a disk tier"),
        ([*HARDWARE, *THREE_TIERS, "disk.threads=0"], "disk.threads must be at least 1, not 0"),
        ([*HARDWARE, "engine.links=shared"], "engine.links has no effect on substrate=hardware"),
        ([*HARDWARE, "tiers.cpu.capacity=unlimited"], "tiers.cpu.capacity is unlimited: substrate=hardware needs a size"),
        (
            [*HARDWARE, "tiers.cpu.capacity=10pages", "hardware.gpus=2", "hardware.rank_jitter=0.1"],
            "hardware.rank_jitter has no effect on substrate=hardware: leave it out",
        ),
        (
            [*HARDWARE, "cluster.failures=[{engine: 0, at_s: 1, back_after_s: 1}]"],
            "cluster.failures: substrate=hardware has no planned failures",
        ),
        (
            [*HARDWARE, "cluster.engines=2", "cluster.engines_per_host=1"],
            "cluster.engines_per_host: substrate=hardware runs on one host: leave it out",
        ),
        (
            [*HARDWARE, "model=nemotron_h_8b", "checkpoint=every_page", "checkpoint.detached=true"],
            "checkpoint.detached_states is null: substrate=hardware needs a number of states to keep",
        ),
        (
            [*HARDWARE, "model=nemotron_h_8b", "checkpoint=last", "tiers.gpu.states=unlimited"],
            "tiers.gpu.states is unlimited: substrate=hardware needs a size, such as 64states",
        ),
    ],
)
def test_what_real_hardware_cannot_do_is_refused_before_it_is_opened(overrides: list[str], expected: str) -> None:
    assert problem(*overrides, command="simulate").startswith(expected)


@pytest.mark.parametrize("command", ["replay", "curve"])
def test_without_a_clock_nobody_waits(command: str) -> None:
    for setting in ("scheduling=priority", "scheduling.max_wait_s=2"):
        assert problem("scheduling=priority", setting, command=command).endswith(
            f" has no effect on kvsim {command}: leave it out"
        )


def test_the_schedule_of_vllm_goes_by_arrival_or_priority() -> None:
    for settings in ([], ["scheduling=priority"]):
        assert plan("rules=vllm", *settings, command="simulate")
    for settings in (["scheduling=longest_prefix"], ["scheduling=priority", "scheduling.max_wait_s=9"]):
        expected = "vLLM's schedule is by arrival or, without CPU offloading, by priority"
        assert expected in problem("rules=vllm", *settings, command="simulate")


def test_a_tier_that_rules_do_not_have_is_refused_before_its_settings() -> None:
    found = problem("preset=sglang_mamba", "tiers.cpu.capacity=1GiB", command="replay")
    assert found.startswith("rules: SGLang's rules for hybrid models have no cpu tier: set tiers.cpu.capacity=0")


@pytest.mark.parametrize(
    ("rules", "engine"), [("vllm", "vLLM"), ("sglang", "SGLang"), ("lightllm", "LightLLM"), ("fastdeploy", "FastDeploy")]
)
def test_engines_whose_rules_run_in_time_have_no_choice_when_computed_pages_are_found(rules: str, engine: str) -> None:
    found = problem(f"rules={rules}", "+rules.cache_chunks=false", command="simulate")
    assert found.startswith(
        f"rules.cache_chunks=false is not supported by {engine}'s rules: set it to true, or set rules=default"
    )


def test_own_rules_in_place_of_an_engines_have_that_choice() -> None:
    tiers = [f"tiers.{tier}.capacity=9GiB" for tier in ("cpu", "disk")]
    for settings in (
        ["rules=default", "rules.cache_chunks=false"],
        ["preset=lightllm", *tiers, "page_tokens=256", "+rules.cache_chunks=false"],
        ["preset=lightllm_hybrid", "+rules.cache_chunks=false"],
    ):
        assert not plan(*settings, command="simulate").rules.cache_chunks


@pytest.mark.parametrize(
    "setting",
    ["preset=sglang rules.loop=overlap", "preset=vllm rules.loop=plain", "preset=vllm_offload rules.blocks_per_chunk=1"],
)
def test_a_setting_of_a_schedule_has_no_effect_on_a_replay_whatever_its_value(setting: str) -> None:
    preset, given = setting.split()
    expected = f"{given.partition('=')[0]} has no effect on kvsim replay, which has no clock: leave it out"
    assert problem(preset, given, command="replay") == expected
    assert plan(preset, given, command="simulate")


def test_a_setting_of_a_presets_own_trace_that_another_trace_lacks_is_blamed_on_the_preset() -> None:
    expected = "trace.prompts is set by the preset, and the trace has no such setting: leave out trace=NAME"
    assert problem("preset=radix_tutorial", "trace=mooncake") == expected
    assert problem("preset=radix_tutorial", "trace=mooncake", "trace.prompts=[a]").startswith("trace.prompts: there is no such")


def test_thresholds_of_duplicates_have_no_effect_where_there_are_none() -> None:
    settings = ["scheduling=longest_prefix", "scheduling.in_batch_duplicates=equal", "scheduling.shared_tokens=64"]
    expected = "scheduling.shared_tokens has no effect with these settings of LongestPrefix: leave it out"
    assert problem(*settings, command="simulate") == expected


def test_the_record_does_not_depend_on_the_folder() -> None:
    assert plan("output=a").config == plan("output=b").config
    assert plan("output=a").output == Path("a")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["tiers.gpu.capacity=0"], "tiers.gpu.capacity is 0"),
        (["prefetch=threshold", "tiers.cpu.capacity=10pages"], "prefetch: ThresholdPrefetch has no effect without a disk tier"),
        (["placement=write_back"], "placement has no effect without a lower tier"),
        (["placement@tiers.cpu.placement=write_back"], "placement@tiers.cpu.placement has no effect without that tier"),
        (["eviction@tiers.disk.eviction=lru"], "eviction@tiers.disk.eviction has no effect without that tier"),
        (["eviction=fifo", "eviction@tiers.gpu.eviction=lru"], "eviction has no effect because every tier has its own"),
        (["engine.max_batch_tokens=1"], "engine.max_batch_tokens has no effect on kvsim replay"),
        (["rules.cache_chunks=false"], "rules.cache_chunks has no effect on kvsim replay: leave it out"),
        (["replay.prefill_chunk_tokens=0"], "replay.prefill_chunk_tokens has no effect under rules without prefill chunks"),
        (["eviction=slru", "eviction.protected_hits=few"], "eviction.protected_hits: 'few' is not a whole number"),
        (["+eviction.colour=red"], "eviction.colour: there is no such setting"),
        (["+tiers.tape.capacity=1"], "tiers.tape: there is no such setting"),
        (["tiers.gpu=40GiB"], "tiers.gpu must be a mapping of settings"),
        (["~eviction"], "eviction is missing: set eviction=NAME"),
        (["eviction._target_=kvsim.policies.placement.write_back.WriteBack"], "eviction._target_: "),
        (["trace.rate=0"], "trace.rate must be above 0"),
        (["replay.in_flight=0"], "replay.in_flight must be at least 1, not 0"),
        (["replay.prefill_chunk_tokens=-1"], "replay.prefill_chunk_tokens must be 0 or more, not -1"),
        (["warmup=1"], "warmup must be at least 0 and below 1"),
        (["seed=-1"], "seed must be 0 or more, not -1"),
        (["rules.cache_output=true", "replay.hold_output=false"], "rules.cache_output needs replay.hold_output=true"),
    ],
)
def test_what_cannot_work_ends_with_its_key(overrides: list[str], expected: str) -> None:
    message = problem(*overrides)
    assert message.startswith(expected)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("speculation.tokens=-1", "engine.speculation.tokens must be 0 or more, not -1"),
        ("speculation.acceptance=[1.5]", "engine.speculation.acceptance must be from 0 to 1, not 1.5"),
        ("lora.max_loras=2", "engine.lora.adapter_bytes must be set with max_loras"),
    ],
)
def test_a_setting_of_a_section_is_named_in_full(setting: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", f"engine.{setting}"]) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: {expected}")


FAULT = "hardware.rank_faults=[{{rank: 1, link: {}, share: 0.1}}]"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["hardware.rank_jitter=0.1"], "hardware.rank_jitter has no effect with gpus=1"),
        (
            ["hardware.gpus=2", "hardware.rank_jitter=0.1"],
            "hardware.rank_jitter has no effect without a lower tier: set tiers.cpu",
        ),
        (
            ["hardware.gpus=2", FAULT.format("disk-cpu")],
            "hardware.rank_faults has no effect on disk-cpu, which this run does not",
        ),
        (
            ["hardware.gpus=2", FAULT.format("disk-gpu"), *THREE_TIERS],
            "hardware.rank_faults has no effect on disk-gpu, which this run does not have: its links are cpu-disk, ",
        ),
        (
            ["hardware.gpus=2", FAULT.format("disk-gpu"), *STRAIGHT],
            "hardware.rank_faults: a load from disk that fails while layers are computed behind it is not modelled: ",
        ),
    ],
)
def test_settings_of_ranks_need_ranks_and_links(overrides: list[str], expected: str) -> None:
    assert problem(*overrides, command="simulate").startswith(expected)


def test_ranks_may_fail_on_the_links_of_the_run() -> None:
    faulty = plan("hardware.gpus=2", FAULT.format("cpu-disk"), *THREE_TIERS, command="simulate")
    assert [(fault.rank, fault.link) for fault in faulty.hardware.rank_faults] == [(1, "cpu-disk")]
    plan("hardware.gpus=2", FAULT.format("disk-gpu"), "engine.overlap=none", *STRAIGHT, command="simulate")
    plan("hardware.rank_jitter=0.0", "tiers.cpu.capacity=10pages", command="simulate")


def test_a_replay_has_no_ranks() -> None:
    assert problem("hardware.gpus=2", "hardware.rank_jitter=0.1", "prefetch=break_even", *THREE_TIERS) == (
        "hardware.rank_jitter has no effect on kvsim replay: leave it out"
    )


def test_a_machine_matters_to_a_replay_whose_policies_read_its_rates() -> None:
    built = plan("hardware=h100", "prefetch=break_even", *THREE_TIERS)
    assert built.hardware == plan("hardware=h100", command="simulate").hardware


def test_the_substrate_is_one_that_there_is() -> None:
    assert problem("substrate=quantum", command="simulate") == "substrate must be one of simulated, hardware, not quantum"


def test_settings_of_tiers_have_their_own_key() -> None:
    own = ("eviction@tiers.cpu.eviction=slru", "tiers.cpu.eviction.protected_hits=0")
    assert problem(*THREE_TIERS, *own).startswith("tiers.cpu.eviction.protected_hits must be at least 1")


def test_checking_the_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    check_output(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system in which no folder can be made")
def test_a_folder_that_cannot_be_made_ends_the_run() -> None:
    with pytest.raises(UsageError, match=r"output: cannot write to /proc/run: .*; choose another folder with output=DIR"):
        check_output(Path("/proc/run"))


def test_a_file_in_the_way_of_the_folder_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match=f"output: cannot write to {folder}: {os.strerror(20)}"):
            check_output(folder)


GROUPS = (
    "eviction", "prefetch", "placement", "checkpoint", "routing", "scheduling", "autoscaling", "admission", "rules", "engine",
    "model", "hardware",
)  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_builds(group: str) -> None:
    """The file of each choice takes the place of the default's; ``model=hf`` needs a file."""
    timed = ("routing", "scheduling", "autoscaling", "admission", "engine", "hardware", "prefetch")
    command = "simulate" if group in timed else "replay"
    tiers = () if group in ("eviction", "rules") else THREE_TIERS  # a bound is for one tier, engines' rules for two at most
    tiers += ("tiers.gpu.capacity=4GiB",) if group == "hardware" else ()
    engines = ("cluster.engines=2",) if group in ("routing", "autoscaling") else ()
    for path in sorted({*(CONF / group).glob("*.yaml")} - {CONF / "model" / "hf.yaml"}):
        settings = OmegaConf.load(path)
        target = settings.get("_target_")
        kind = target and hydra.utils.get_class(target)
        is_hybrid = group == "checkpoint" or getattr(kind, "serves_hybrid_models", False)
        model = ("model=qwen3_next_80b",) if is_hybrid else ()
        model += ("model=gemma3_27b",) if getattr(kind, "serves_windows", False) else ()
        config = composed(*tiers, *model, *engines)
        with open_dict(config):  # no checkpoint is chosen by default
            config[group] = settings
        assert build_run(config, command=command, overrides=[f"{group}={path.stem}", *tiers, *model, *engines])


@pytest.mark.parametrize("setting", ["routing=random", "cluster.engines_per_host=1", "routing@cluster.decode_routing=random"])
def test_settings_of_a_cluster_need_one(setting: str) -> None:
    with pytest.raises(UsageError, match="has no effect"):
        plan(setting, command="simulate")


@pytest.mark.parametrize(
    "shared",
    [
        ["tiers.cpu.capacity=1GiB"],
        ["cluster.engines_per_host=1", "tiers.disk.capacity=1GiB", "tiers.disk.below=gpu", "tiers.disk.scope=cluster"],
        ["tiers.cpu.capacity=1GiB", "tiers.cpu.scope=engine", "tiers.disk.capacity=1GiB"],
    ],
)
def test_engines_of_a_hybrid_model_share_no_tier(shared: list[str]) -> None:
    apart = ["model=qwen3_next_80b", "model.weight_dtype_bytes=1", "cluster.engines=2", "tiers.gpu.capacity=20GiB"]
    assert plan(*apart, command="simulate") and plan(
        *apart, "cluster.engines_per_host=1", "tiers.disk.capacity=1GiB", "tiers.disk.below=gpu", command="simulate"
    )
    with pytest.raises(UsageError, match="cluster: engines that serve a model with recurrent layers share no tier"):
        plan(*apart, *shared, command="simulate")
