"""Presets of hybrid models, each on a few requests that can be followed by hand.

A block is one page of 64 tokens unless said otherwise. The prompts of ``CHAT`` are two users of one system prompt of two
blocks, and the first user again with the answer that the second turn's prompt holds.
"""

from pathlib import Path

import pytest

from kvsim.api import Result, load_trace, replay
from kvsim.core.request import Request
from kvsim.plans.build import build_run
from kvsim.run.play import replay as replay_plan
from kvsim.settings.configuration import compose
from tests.states.slow_hybrid import SlowHybrid
from tests.workloads import conversations, make_request, pages_of, write_trace

BLOCK = 64


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def line(blocks: list[int], output: int = 65, block: int = BLOCK, tail: int = 1) -> Request:
    """A prompt of these blocks and ``tail`` tokens more."""
    return make_request(blocks, prompt_tokens=block * len(blocks) + tail, output_tokens=output)


CHAT = [line([1, 2, 3]), line([1, 2, 4]), line([1, 2, 5]), line([1, 2, 3, 6, 7])]


def played(preset: str, lines: list[Request], *overrides: str, block: int = BLOCK, answers: str = "inferred") -> Result:
    write_trace(Path("trace.jsonl"), lines)
    trace = load_trace("mooncake", path="trace.jsonl", block_tokens=block, page_tokens=block, answers=answers)
    return replay(trace, f"preset={preset}", *overrides)


def hits(result: Result) -> list[int]:
    return result.hit_pages.sum(axis=1).tolist()


def test_marconi_saves_at_the_second_visit_and_after_answers() -> None:
    """Request 1 leaves the known path after two blocks: a state there, which request 2 hits. The state after request 0's answer,
    block 6, is what request 3 begins from."""
    result = played("marconi", CHAT)
    assert hits(result) == [0, 0, 2, 4]
    # Saved: after the answers of all four, and once at the junction.
    assert result.record["checkpoints"]["saved"] == 5
    assert result.record["checkpoints"]["used"] == 2


def test_sglang_plus_is_marconi_with_lru() -> None:
    assert hits(played("sglang_plus", CHAT)) == [0, 0, 2, 4]
    assert played("sglang_plus", CHAT).record["config"]["eviction"]["_target_"].endswith("LRUWithStates")
    assert played("marconi", CHAT).record["config"]["eviction"]["alpha"] == "tuned"


def test_in_the_baselines_a_state_leaves_with_its_leaf_and_not_before() -> None:
    """A state takes 7 pages. The two prompts and their three states take 25, each of the six others 8, of 60. The state after the
    system prompt is older than theirs, but block 3 and block 4, with the states after them, are the oldest leaves."""
    lines = [line(blocks, output=1) for blocks in ([1, 2, 3], [1, 2, 4], *([number] for number in range(10, 16)), [1, 2, 8])]
    result = played("sglang_plus", lines[:-1], "tiers.gpu.capacity=60pages")
    counts = result.record["checkpoints"]
    assert (counts["saved"], counts["evicted"]) == (3 + 6, 2)
    assert hits(played("sglang_plus", lines, "tiers.gpu.capacity=60pages")) == [0, 0, 0, 0, 0, 0, 0, 0, 2]


def test_vllm_plus_hits_whatever_is_known() -> None:
    """Saved: three blocks and the answer's, then a block each, then block 7."""
    result = played("vllm_plus", CHAT)
    assert hits(result) == [0, 2, 2, 4]
    assert result.record["checkpoints"]["saved"] == 4 + 1 + 1 + 1


BY_KVSIM_S_RULES = ("rules=default", "rules.cache_output=true")


@pytest.mark.parametrize("rules", [(), BY_KVSIM_S_RULES])
def test_sglang_mamba_saves_at_the_end_of_prompts_too(rules: tuple[str, ...]) -> None:
    """The same prompt again, without an answer in between, is hit up to its last full page."""
    assert hits(played("sglang_mamba", CHAT, *rules)) == [0, 0, 2, 4]
    again = [line([1, 2, 3], output=1), line([1, 2, 3], output=1)]
    assert hits(played("sglang_mamba", again, *rules)) == [0, 3]


def test_sglang_mamba_refreshes_only_the_state_that_is_used() -> None:
    """Room for three states: after prompts a, ab and c. The last abd begins from ab's, so a's state leaves for its own."""
    lines = [line([1], 1), line([1, 2], 1), line([9], 1), line([1, 2, 3], 1), line([1, 8], 1)]
    result = played("sglang_mamba", lines, *BY_KVSIM_S_RULES, "tiers.gpu.states=3states")
    assert hits(result) == [0, 1, 0, 2, 0], "the KV of block 1 is there, its state is not"


def test_vllm_hybrid_retains_junctions_and_replay_boundaries() -> None:
    """No answers here. The junction after block 2 is saved by request 1; request 3 finds it, and its own prompt's beginning,
    block 3's replay boundary from request 0."""
    result = played("vllm_hybrid", CHAT, answers="none")
    assert hits(result) == [0, 0, 2, 3]
    every = played("vllm_hybrid", CHAT, "checkpoint.interval_tokens=1", answers="none")
    assert hits(every) == [0, 0, 2, 3], "the first prompt is one step of three blocks and one of its last token"
    small = ("checkpoint.interval_tokens=1", "replay.prefill_chunk_tokens=64")
    assert hits(played("vllm_hybrid", CHAT, *small, answers="none")) == [0, 2, 2, 3]


def test_kvsim_s_own_rules_save_the_states_of_an_interval_wherever_a_prompt_is_cut() -> None:
    own = ("rules=default", "checkpoint.interval_tokens=1")
    assert hits(played("vllm_hybrid", CHAT, *own, answers="none")) == [0, 2, 2, 3]
    some = ("rules=default", "checkpoint.interval_tokens=192")
    assert hits(played("vllm_hybrid", CHAT, *some, answers="none")) == [0, 0, 0, 3], "a state after every third block only"


@pytest.mark.parametrize("preset", ["vllm_hybrid", "lightllm_hybrid"])
def test_a_prompt_shorter_than_a_page_is_served(preset: str) -> None:
    assert hits(played(preset, [make_request([1], prompt_tokens=28, output_tokens=3)] * 2, answers="none")) == [0, 0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tiers.gpu.states=64states"], r"rules: vLLM keeps states and pages in one pool: set tiers\.gpu\.states=shared"),
        (["eviction=lfu"], "rules: vLLM evicts the block used least recently, not by LFU: set eviction=lru"),
        (["checkpoint=branch"], "rules: vLLM keeps states at junctions and intervals, not by Branch: set checkpoint=retention"),
        (["checkpoint.interval_tokens=100"], r"rules: checkpoint\.interval_tokens=100 must be a multiple of page_tokens=64"),
        (["checkpoint.detached=true"], "rules: vLLM neither limits the states of a path nor detaches any: leave out"),
        (
            ["+rules.recompute_last_token=false"],
            r"rules\.recompute_last_token=false is not supported by vLLM's rules for hybrid models: set it to true",
        ),
        (["rules.state_pages=0"], r"rules\.state_pages must be at least 1, not 0; null derives it from the model"),
        (
            ["rules.state_pages=1", "tiers.cpu.capacity=9pages"],
            r"rules\.state_pages has no effect on kvsim replay with tiers gpu, cpu",
        ),
    ],
)
def test_what_vllm_s_rules_do_not_know_is_an_error(overrides: list[str], message: str) -> None:
    from kvsim.errors import UsageError

    with pytest.raises(UsageError, match=f"^{message}"):
        played("vllm_hybrid", CHAT, *overrides, answers="none")


def test_vllm_hybrid_computes_the_last_token_of_an_aligned_prompt() -> None:
    """Three full blocks: two can be replayed, and the state is there."""
    lines = [line([1, 2, 3], tail=0), line([1, 2, 3], tail=0)]
    assert hits(played("vllm_hybrid", lines, answers="none")) == [0, 2]


def test_lightllm_hybrid_takes_kv_from_the_cpu_and_the_state_that_was_detached() -> None:
    """Pages of 256 tokens, room for 12 on the GPU. Prompts of 8 pages push one another out; the CPU has all."""
    a, b = list(range(1, 9)), list(range(11, 19))
    lines = [line(prompt, 1, 256) for prompt in (a, b, a, a)]
    setting = ("rules=default", "tiers.gpu.capacity=12pages", "tiers.cpu.capacity=100pages")
    result = played("lightllm_hybrid", lines, *setting, block=256, answers="none")
    gpu, cpu, disk = result.hit_pages.T.tolist()
    assert [sum(row) for row in zip(gpu, cpu, disk, strict=True)] == [0, 0, 8, 8]
    # a's first pages stayed on the GPU and are booked there; the rest of the path came from the CPU.
    assert (gpu[2], cpu[2]) == (4 - 1, 5) and (gpu[3], cpu[3]) == (8, 0)
    assert disk == [0, 0, 0, 0]
    assert result.record["checkpoints"]["detached"] > 0
    without = played(
        "lightllm_hybrid", lines, *setting, "checkpoint.detached=false", "checkpoint.detached_states=null", block=256
    )
    assert hits(without) == [0, 0, 0, 8]


def test_lightllm_hybrid_saves_a_state_after_every_chunk_but_the_last() -> None:
    """Each prompt leaves two nodes of four pages. a's second one makes room for the last token of b; its state stays,
    detached, and its pages are on the CPU. Then the second one of b makes room for them."""
    a, b = list(range(1, 9)), list(range(11, 19))
    lines = [line(prompt, 1, 256) for prompt in (a, b, a)]
    setting = ("tiers.gpu.capacity=16pages", "tiers.cpu.capacity=100pages", "replay.prefill_chunk_tokens=1024")
    result = played("lightllm_hybrid", lines, *setting, block=256, answers="none")
    assert result.hit_pages.tolist() == [[0, 0, 0], [0, 0, 0], [4, 4, 0]]
    assert result.record["checkpoints"]["detached"] == 2


def test_lightllm_hybrid_books_what_came_from_disk_as_disk() -> None:
    """The CPU has room for ten pages: a's leave it for the disk, on which prompts of 2,048 tokens are kept."""
    a, b = list(range(1, 9)), list(range(11, 19))
    lines = [line(prompt, 1, 256) for prompt in (a, b, a)]
    sizes = ("tiers.gpu.capacity=10pages", "tiers.cpu.capacity=10pages", "tiers.disk.capacity=100pages")
    result = played("lightllm_hybrid", lines, *sizes, block=256, answers="none")
    gpu, cpu, disk = result.hit_pages[2].tolist()
    assert gpu + cpu + disk == 8 and disk > 0 and disk == 8 - gpu - cpu


@pytest.mark.parametrize("preset", ["marconi", "sglang_plus", "vllm_plus", "sglang_mamba"])
def test_presets_that_cache_answers_say_so_if_the_trace_does_not_know_them(preset: str) -> None:
    from kvsim.errors import UsageError

    with pytest.raises(UsageError, match=r"trace\.answers=inferred"):
        played(preset, CHAT, answers="none")


def test_marconi_with_states_in_room_of_their_own_needs_an_alpha() -> None:
    from kvsim.errors import UsageError

    with pytest.raises(
        UsageError, match=r"^eviction of the gpu tier: FlopAware alpha=tuned needs recurrent states to share the pages' memory"
    ):
        played("marconi", CHAT, "tiers.gpu.states=9states")
    assert hits(played("marconi", CHAT, "tiers.gpu.states=9states", "eviction.alpha=0.5")) == [0, 0, 2, 4]


@pytest.mark.parametrize("states", [3, 30])
@pytest.mark.parametrize(
    ("preset", "page_tokens", "overrides"),
    [
        ("sglang_mamba", 64, BY_KVSIM_S_RULES),
        ("vllm_hybrid", 64, BY_KVSIM_S_RULES),
        ("vllm_hybrid", 64, (*BY_KVSIM_S_RULES, "checkpoint.interval_tokens=192")),
        ("lightllm_hybrid", 256, ("rules=default",)),
    ],
)
def test_conversations_hit_what_the_slow_model_hits(
    preset: str, page_tokens: int, overrides: tuple[str, ...], states: int
) -> None:
    """Room for all pages and for a few states."""
    room = ("tiers.gpu.capacity=unlimited", f"tiers.gpu.states={states}states")
    chosen = (f"preset={preset}", f"page_tokens={page_tokens}", *room, *overrides)
    plan = build_run(compose(chosen), command="replay", overrides=chosen)
    requests = conversations(2, requests=200, page_tokens=page_tokens)
    grid = plan.model.checkpoint_grid_tokens(page_tokens) // page_tokens
    slow = SlowHybrid(plan.checkpoint, states, grid, plan.rules.recompute_last_token)
    rows = replay_plan(plan, requests).hit_pages.sum(axis=1).tolist()
    for request, hit_pages in zip(requests, rows, strict=True):
        prompt, answer = tuple(pages_of(request.runs)), tuple(pages_of(request.output_runs or ()))
        replayed = min(len(prompt), (request.prompt_tokens - 1) // page_tokens)
        expected = slow.use(prompt, answer if plan.rules.cache_output else None, replay=replayed)
        assert hit_pages == expected, request.index
    assert sum(rows) > 150
