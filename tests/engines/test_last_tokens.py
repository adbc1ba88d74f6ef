"""The last token of an answer has no KV, since it is not fed back: a page that it would complete is never found."""

import pytest

import kvsim

PRESETS = {
    "vllm": [],
    "vllm_offload": ["tiers.cpu.capacity=20pages"],
    "sglang": [],
    "sglang_hicache": ["tiers.cpu.capacity=20pages"],
    "lightllm": [],
    "fastdeploy": ["tiers.cpu.capacity=20pages"],
    "fastdeploy with storage": ["tiers.cpu.capacity=20pages", "tiers.disk.capacity=30pages"],
}
LOOPS = {"vllm": "overlap", "vllm_offload": "overlap", "sglang": "plain", "sglang_hicache": "plain"}
"""The loops that are not a preset's own."""


def found(command: str, preset: str, answer: list[int], page_tokens: int, *settings: str) -> int:
    """The pages that a prompt finds, on any tier, that goes on after a prompt 1 2 3 4 and an answer to it."""
    prompts = [[1, 2, 3, 4], [1, 2, 3, 4, *answer, 99]]
    trace = kvsim.trace_from_tokens(prompts, answers=[answer, [0]], arrivals_s=[0.0, 100.0], page_tokens=page_tokens)
    tiers = ["tiers.gpu.capacity=40pages", *PRESETS[preset]]
    result = getattr(kvsim, command)(trace, f"preset={preset.split()[0]}", "model=tiny", *tiers, *settings)
    assert not result.record.get("rules_note")  # it says when kvsim's own apply
    return int(result.hit_pages[1].sum())


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_page_that_only_the_last_token_completes_is_not_found(command: str, preset: str) -> None:
    """Pages of four tokens: with 4 tokens of answer, the second page lacks the KV of its last one; with 5, it is complete."""
    loops = [[], [f"rules.loop={LOOPS[preset]}"]] if command == "simulate" and preset in LOOPS else [[]]
    for loop in loops:
        assert found(command, preset, [5, 6, 7, 8], 4, *loop) == 1
        assert found(command, preset, [5, 6, 7, 8, 9], 4, *loop) == 2


@pytest.mark.parametrize("command", ["replay", "simulate"])
@pytest.mark.parametrize("preset", ["sglang", "lightllm"])
def test_token_by_token_all_but_the_last_one_is_found(command: str, preset: str) -> None:
    assert found(command, preset, [5, 6, 7, 8], 1) == 4 + 3
