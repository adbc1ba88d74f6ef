"""What the head of a page says of a run."""

import shlex
from typing import Any

from kvsim.report.about import about_run, also_set, degrees

RESULT: dict[str, Any] = {
    "command": "simulate", "seed": 3, "config": {"hardware": {"gpus": 8}, "cluster": {"prefill": 0, "decode": 0}},
    "choices": {"hardware": "h100", "model": "llama3_70b", "eviction": "lru"}, "slo": {"ttft_s": 2.0, "tpot_s": 0.05},
    "tiers": {"gpu": {"capacity_pages": 100}},
    "command_line": "kvsim simulate trace.path=log.jsonl model=llama3_70b hardware=h100 hardware.gpus=8 slo.ttft_s=2 "
    "tiers.gpu.capacity=100pages engine.max_batch_tokens=4096 trace.spread=true eviction@tiers.gpu.eviction=lru output=out",
}  # fmt: skip


def test_the_machine_is_named_with_its_number_of_gpus_and_how_they_divide_the_model() -> None:
    assert dict(about_run(RESULT))["hardware"] == "8x h100 · TP8"
    one = RESULT | {"config": {"hardware": {"gpus": 1}}}
    assert dict(about_run(one))["hardware"] == "h100"
    apart = RESULT | {"config": RESULT["config"] | {"cluster": {"prefill": 3, "decode": 1}}, "engines": [{}] * 4}
    assert dict(about_run(apart))["hardware"] == "8x h100 · TP8 · 4 engines (3 prefill, 1 decode)"


def test_stages_and_groups_of_experts_are_named() -> None:
    def machine(**degrees: int) -> str:
        return dict(about_run(RESULT | {"config": {"hardware": {"gpus": 8} | degrees}}))["hardware"]

    assert machine(pipeline_parallel=2) == "8x h100 · TP4 PP2"
    assert machine(pipeline_parallel=2, expert_parallel=4) == "8x h100 · TP4 PP2 EP4"
    assert machine(pipeline_parallel=1, expert_parallel=8) == "8x h100 · TP8 EP8"
    assert degrees({"pipeline_parallel": 2}, 1) == "PP2", "one GPU has no two stages"


def test_objectives_are_shown_where_there_are_any() -> None:
    assert dict(about_run(RESULT))["objectives"] == "TTFT <= 2 s and TPOT <= 0.05 s"
    assert "objectives" not in dict(about_run(RESULT | {"slo": None}))


def test_whatever_else_the_command_line_sets_is_shown_once() -> None:
    assert also_set(RESULT) == ["engine.max_batch_tokens=4096", "trace.spread=true"]
    shown = " ".join(text for _, text in about_run(RESULT))
    for word in shlex.split(RESULT["command_line"])[2:]:
        key, _, value = word.partition("=")
        assert value.removesuffix("pages") in shown or key in ("trace.path", "output"), word


def test_a_run_without_a_command_line_has_none() -> None:
    assert "also set" not in dict(about_run({key: value for key, value in RESULT.items() if key != "command_line"}))
