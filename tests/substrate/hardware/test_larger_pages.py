"""LightLLM's caches on real memory: single pages on the GPU, larger ones on the host, and loads that begin inside one."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import kvsim  # noqa: E402
from kvsim.cli import main  # noqa: E402
from kvsim.core.request import Request  # noqa: E402
from kvsim.substrate.hardware.memory import tier_copy  # noqa: E402
from kvsim.substrate.hardware.memory.tier_copy import TierCopy  # noqa: E402
from tests.engine.small import ask, make_requests  # noqa: E402
from tests.substrate.hardware.small import PAGE_BYTES, PAGE_TOKENS, SMALL, in_turn, plan, serve, tiers  # noqa: E402

STORY = ("abcdef", "abcx", "klmnopq", "abcdefgh", "rstuvwxyz", "abyz", "abcdefghi", "klmnopqr", "abcdefghij", "abcy")


def lightllm(gpu: int, cpu: int, unit: int) -> list[str]:
    """Overrides for LightLLM's caches: ``unit`` pages of the GPU make one of the CPU."""
    return ["preset=lightllm", *tiers(gpu, cpu), f"tiers.cpu.page_tokens={unit * PAGE_TOKENS}", "placement.min_tokens=1"]


@pytest.mark.parametrize("unit", [1, 2, 3])
def test_one_at_a_time_all_is_as_simulated_and_every_reused_page_is_right(unit, tmp_path):
    """Only a load that begins inside a larger page moves less: in a simulation it moves all of that page."""
    settings = lightllm(12, 4 * unit + 13, unit)
    real = serve(plan(tmp_path, *settings), in_turn(*STORY))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn(*STORY))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert real.hit_pages[:, :2].sum(axis=0).all(), "both tiers are hit"
    assert real.tiers == simulated.tiers and real.placement == simulated.placement
    found = real.hardware
    assert (found["wrong_words"], found["verified_pages"]) == (0, real.hit_pages.sum())
    assert found["page_moves"] == {name: link.bytes // PAGE_BYTES for name, link in real.links.items()}
    assert found["page_moves"]["cpu-gpu"] == real.hit_pages[:, 1].sum()
    assert real.links["gpu-cpu"].bytes == simulated.links["gpu-cpu"].bytes
    begun_inside = simulated.links["cpu-gpu"].bytes // PAGE_BYTES - found["page_moves"]["cpu-gpu"]
    assert begun_inside == {1: 0, 2: 1, 3: 4}[unit]


def test_many_at_a_time_reuse_right_pages(tmp_path, monkeypatch):
    """Small steps, so that chunks mix with decodes, and loads in parts, so that layers wait for theirs."""
    monkeypatch.setattr(tier_copy, "PART_BYTES", 1)
    words = ("abcdef", "klmno", "abcdefgh", "abxy", "klmnopq", "abcdefgi", "rstuvw", "klmnopqr", "abcdefghij")
    requests = make_requests([ask(word, output=5, after=max(-1, at - 2)) for at, word in enumerate(words)], PAGE_TOKENS)
    settings = [*lightllm(22, 61, 2), "engine.max_batch_tokens=14"]
    outcome = serve(plan(tmp_path, *settings), requests)
    assert not outcome.status.any() and outcome.hardware["wrong_words"] == 0
    assert outcome.hardware["verified_pages"] == outcome.hit_pages.sum() and outcome.hit_pages[:, 1].any()


@pytest.mark.gpu
def test_on_a_gpu_single_tokens_are_right_beside_steps_and_copies(tmp_path, monkeypatch):
    """Tokens of 4 KiB a layer in CPU pages of 64, layers that take a while, and copies both ways in parts."""
    monkeypatch.setattr(tier_copy, "PART_BYTES", 1 << 16)
    wide = ["model.layers=8", "model.hidden_size=1024", "model.heads=8", "model.kv_heads=8", "model.head_dim=128"]
    wide += ["model.mlp_width=4096", "model.kv_dtype_bytes=2", "model.weight_dtype_bytes=2"]
    sizes = ["tiers.gpu.capacity=2000pages", "tiers.cpu.capacity=8000pages", "tiers.cpu.page_tokens=64", "placement.min_tokens=1"]
    prompts = [[(seed * step) % 9973 for step in range(400 + 37 * at)] for at, seed in enumerate((1, 3, 5, 1, 7, 9, 3, 5, 11, 1))]
    trace = kvsim.trace_from_tokens(prompts, output_tokens=8, sessions=[at % 2 for at in range(len(prompts))], page_tokens=1)
    settings = ["preset=lightllm", *SMALL[:1], *wide, *sizes, "substrate=hardware", f"output={tmp_path / 'run'}"]
    result = kvsim.simulate(trace, *settings)
    found = result.record["hardware"]
    assert result.hit_pages[:, 1].sum() > 0 and found["wrong_words"] == 0
    assert found["verified_pages"] == result.hit_pages.sum()


def test_pages_of_answers_are_found_on_the_gpu(tmp_path):
    """The first answer completes the prompt's third page and one more, which the second prompt goes on with."""
    first = Request(
        index=0, arrival_s=0.0, prompt_tokens=10, output_tokens=8, runs=((0, 2),), prompt_pages=2, output_runs=((2, 2),)
    )
    second = Request(
        index=1, arrival_s=0.0, prompt_tokens=19, output_tokens=1, runs=((0, 4),), prompt_pages=4, output_runs=(), after=0
    )
    outcome = serve(plan(tmp_path, *lightllm(20, 20, 2), "rules.cache_output=true"), [first, second])
    assert outcome.hit_pages[1].tolist() == [4, 0, 0]
    assert (outcome.hardware["verified_pages"], outcome.hardware["wrong_words"]) == (4, 0)


@pytest.mark.parametrize("way", ["load", "store"])
def test_a_wrong_place_inside_a_larger_page_is_found_out(way, tmp_path, monkeypatch):
    """Every page is taken from, or put to, the place of its neighbour."""
    move = getattr(TierCopy, way)

    def misplaced(self, first, second, **how):
        host, gpu = (first, second) if way == "load" else (second, first)
        host = host // 2 * 2 + (host + 1) % 2
        return move(self, host, gpu, **how) if way == "load" else move(self, gpu, host, **how)

    monkeypatch.setattr(TierCopy, way, misplaced)
    outcome = serve(plan(tmp_path, *lightllm(12, 21, 2)), in_turn(*STORY[:4]))
    assert outcome.hardware["wrong_pages"] >= outcome.hit_pages[:, 1].sum() > 0


def test_ranks_have_their_shares_of_larger_pages(tmp_path):
    settings = [*lightllm(12, 21, 2), "model.heads=4", "model.kv_heads=2", "hardware.gpus=2"]
    outcome = serve(plan(tmp_path, *settings), in_turn(*STORY))
    found = outcome.hardware
    assert (found["gpus"], found["verified_pages"], found["wrong_words"]) == (2, outcome.hit_pages.sum(), 0)
    assert outcome.hit_pages[:, 1].any()


@pytest.mark.long
def test_engines_have_cpu_caches_of_their_own(tmp_path):
    settings = [*lightllm(12, 47, 2), "cluster.engines=2", "tiers.cpu.scope=engine"]
    words = [word for word in STORY for _ in range(2)]
    real = serve(plan(tmp_path, *settings), in_turn(*words))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn(*words))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist() and real.hit_pages[:, 1].any()
    assert (real.hardware["verified_pages"], real.hardware["wrong_words"]) == (real.hit_pages.sum(), 0)


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Prompts of single tokens on the GPU, where a token takes 512 bytes of a layer; overrides that name them."""
    prompts = [[*range(40)], [*range(100, 140)], [*range(35), 7, 8, 9]]
    lines = [{"session_id": 1, "delay": 300, "token_ids": prompt, "output_length": 2} for prompt in prompts]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    model = [*SMALL[:-1], "model.heads=4", "model.kv_heads=4", "model.hidden_size=64"]
    sizes = ["tiers.gpu.capacity=50pages", "tiers.cpu.capacity=100pages", "tiers.cpu.page_tokens=16", "placement.min_tokens=1"]
    return ["preset=lightllm", *model, *sizes, "trace=tokens", "trace.path=trace.jsonl", "output=run"]


def test_the_preset_is_served_token_by_token(trace):
    assert main(["simulate", *trace, "substrate=hardware"]) == 0
    record = json.loads(Path("run/result.json").read_text())
    assert record["config"]["page_tokens"] == 1 and "rules_note" not in record
    assert record["hit_pages"] == {"gpu": 0, "cpu": 32, "disk": 0}
    assert (record["hardware"]["verified_pages"], record["hardware"]["wrong_words"]) == (32, 0)


def test_a_validation_compares_lightllm_s_rules_with_themselves(trace):
    assert main(["validate", *trace, "hardware=h200", "validate.ttft_p50=9", "validate.ttft_p99=9"]) == 0
    record = json.loads(Path("run/validate.json").read_text())
    assert record["identical"] == 1
    for name in ("simulated", "hardware"):
        run = json.loads(Path(f"run/{name}/result.json").read_text())
        assert run["config"]["rules"]["_target_"].endswith("LightLLMRules") and run["hit_pages"]["cpu"] == 32


def test_answers_that_share_a_prompt_verify_its_full_pages_only(tmp_path):
    """Each answer has a page of its own for the last tokens of the prompt."""
    requests = make_requests([ask("abcde", output=6)])
    requests[0].samples = 3
    requests[0].prompt_tokens = 4 * PAGE_TOKENS + 2
    real = serve(plan(tmp_path, "rules=lightllm", "rules.cache_output=false", *tiers(30)), requests)
    assert (real.hardware["wrong_words"], real.hardware["verified_pages"]) == (0, 8)
