"""Recurrent states on real memory: what a request begins from is what was saved, wherever it has been meanwhile."""

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.cli import main  # noqa: E402
from kvsim.core.request import Request  # noqa: E402
from kvsim.errors import UsageError, WrongResult  # noqa: E402
from kvsim.run.play import check_verified  # noqa: E402
from kvsim.substrate.hardware.disk import passage  # noqa: E402
from tests.engine.small import ask, make_requests  # noqa: E402
from tests.substrate.hardware.small import PAGE_TOKENS, SMALL, in_turn, plan, serve, tiers  # noqa: E402

HYBRID = (
    "+model.recurrent_layers=1",
    "+model.state_heads=2",
    "+model.state_key_dim=8",
    "+model.state_value_dim=16",
    "+model.recurrent_in_width=82",
    "+model.conv_channels=48",
    "+model.conv_width=4",
    "+model.state_flops_per_element=5",
)
"""An attention layer and a recurrent one; a page has 512 bytes, a state 1,600: four pages."""
STORY = ("abcd", "abcx", "klmn", "abcdef", "pq", "klmno", "abcd")
OWN = ("tiers.gpu.states=2states", "tiers.cpu.states=12states")
either_room = pytest.mark.parametrize(
    "rooms", [pytest.param(OWN, id="own"), pytest.param((), id="shared", marks=pytest.mark.long)]
)
"""States in memory of their own, or in pages, as other tests of this file have them."""


def run_both(folder, words, *settings):
    real = serve(plan(folder, *HYBRID, *settings), in_turn(*words))
    simulated = serve(plan(folder, *HYBRID, *settings, substrate="simulated"), in_turn(*words))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert real.tiers == simulated.tiers and real.checkpoints == simulated.checkpoints
    moved, expected = ({name: link.bytes for name, link in run.links.items()} for run in (real, simulated))
    assert moved == expected
    assert real.hardware["wrong_words"] == 0
    return real


def test_states_with_memory_of_their_own_are_as_simulated_and_right(tmp_path):
    real = run_both(tmp_path, STORY, *tiers(8, 30), *OWN, "checkpoint=every_page")
    assert real.hit_pages[:, :2].sum(axis=0).all(), "both tiers are hit"
    assert real.hardware["verified_states"] == real.checkpoints["used"] > 0
    assert real.hardware["verified_pages"] == real.hit_pages.sum()
    assert {name: count for name, count in real.hardware["page_moves"].items() if "states" in name}.keys() == {
        "gpu-cpu states", "cpu-gpu states",
    }  # fmt: skip


@pytest.mark.parametrize("placement", [pytest.param("write_through", marks=pytest.mark.long), "write_back"])
def test_states_in_pages_are_as_simulated_and_right_in_all_tiers(placement, tmp_path):
    settings = [*tiers(14, 14, 90), f"placement={placement}", "checkpoint=last"]
    real = run_both(tmp_path, (*STORY, *STORY), *settings)
    assert real.hit_pages.sum(axis=0)[1:].all(), "the tiers below are hit"
    assert real.hardware["verified_states"] == real.checkpoints["used"] > 0


def test_states_in_pages_pass_to_a_disk_below_the_gpu_and_back(tmp_path, monkeypatch):
    """Parts of three pages, of which a state has four."""
    monkeypatch.setattr(passage, "BUFFER_BYTES", 3 * 512)
    real = run_both(tmp_path, (*STORY, *STORY), *tiers(14, 0, 90), "tiers.disk.below=gpu", "checkpoint=last")
    assert real.hit_pages[:, 2].any(), "the disk is hit"
    assert real.hardware["verified_states"] == real.checkpoints["used"] > 0


@either_room
def test_detached_states_are_kept_when_their_pages_leave(rooms, tmp_path):
    settings = [*tiers(9, 40), *rooms, "checkpoint=every_page", "checkpoint.detached=true", "checkpoint.detached_states=3"]
    settings += ["checkpoint.max_states_per_path=1"]
    real = run_both(tmp_path, (*STORY, *STORY), *settings)
    assert real.checkpoints["detached"] > 0
    assert real.hardware["verified_states"] > real.checkpoints["used"] > 0


def test_a_request_may_push_out_the_detached_state_that_it_begins_from(tmp_path):
    """Room for abx is made by cd, whose state takes the only place of detached ones, that of ab."""
    settings = [*tiers(4, 40), "tiers.gpu.states=4states", "tiers.cpu.states=1states"]
    settings += ["checkpoint=last", "checkpoint.detached=true", "checkpoint.detached_states=1"]
    real = run_both(tmp_path, ("ab", "cd", "abx"), *settings)
    assert real.hit_pages[2].sum() == 2 and real.checkpoints["detached"] == 2
    assert real.hardware["verified_states"] == 3


@either_room
def test_the_state_after_an_answer_is_what_a_follow_up_begins_from(rooms, tmp_path):
    """The first answer completes the prompt's third page and one more, which the second prompt goes on with."""
    first = Request(
        index=0, arrival_s=0.0, prompt_tokens=10, output_tokens=8, runs=((0, 2),), prompt_pages=2, output_runs=((2, 2),)
    )
    second = Request(
        index=1, arrival_s=0.0, prompt_tokens=19, output_tokens=1, runs=((0, 4),), prompt_pages=4, output_runs=(), after=0
    )
    cpu = 20 if rooms else 0
    made = plan(tmp_path, *HYBRID, *tiers(30, cpu), *rooms, "rules.cache_output=true", "checkpoint=last")
    outcome = serve(made, [first, second])
    assert outcome.hit_pages[1].tolist() == [4, 0, 0]
    found = outcome.hardware
    assert (found["verified_pages"], found["verified_states"], found["wrong_words"]) == (4, 1, 0)


@either_room
def test_many_at_a_time_begin_from_right_states(rooms, tmp_path):
    """Small steps, so that chunks of several requests mix with decodes, and states come and go meanwhile."""
    words = ("abcd", "klm", "abcdef", "abxy", "klmno", "abcdef", "abcd", "klmno")
    asks = [ask(word, 0.1 * at, output=2) for at, word in enumerate(words)]
    settings = [*tiers(24, 60), *rooms, "engine.max_batch_tokens=14", "placement=write_back", "checkpoint=every_page"]
    outcome = serve(plan(tmp_path, *HYBRID, *settings), make_requests(asks, PAGE_TOKENS))
    assert not outcome.status.any() and outcome.hardware["wrong_words"] == 0
    assert outcome.hardware["verified_states"] >= outcome.checkpoints["used"] > 0


@pytest.mark.long
def test_two_engines_have_states_of_their_own(tmp_path):
    """Each in a process of its own, with its own CPU tiers side by side in the same host memory."""
    words = ("abcd", "klmn", "pqrs", "abcde", "klmno", "pqrst", "abcdx", "klmnx")
    settings = [*tiers(8, 40), *OWN, "cluster.engines=2", "tiers.cpu.scope=engine", "routing=round_robin", "checkpoint=last"]
    real = run_both(tmp_path, words, *settings)
    assert real.hit_pages[:, :2].sum() > 0
    assert real.hardware["gpus"] == 2 and real.hardware["verified_states"] == real.checkpoints["used"] > 0


def test_more_requests_than_run_at_once_take_turns_with_their_states(tmp_path):
    asks = [ask(word, 0.0, output=3) for word in ("ab", "cd", "ef", "ab", "cd", "ef")]
    settings = [*tiers(20), OWN[0], "engine.max_running_requests=2", "checkpoint=last"]
    outcome = serve(plan(tmp_path, *HYBRID, *settings), make_requests(asks, PAGE_TOKENS))
    assert not outcome.status.any() and outcome.hardware["wrong_words"] == 0
    assert outcome.hardware["verified_states"] == outcome.checkpoints["used"] > 0


@pytest.mark.parametrize(("rooms", "pool"), [(OWN, 1), ((), 0)], ids=["own", "shared"])
def test_a_state_that_has_changed_is_found_out(rooms, pool, tmp_path):
    """A word of the first slot that a load of a state reads is changed before."""

    def flip(substrate):
        copy = substrate.copy

        def flipped(transfer):
            if not transfer.goes_down and transfer.nodes[0].is_state:
                substrate.hosts[pool].rows[transfer.nodes[0].slots[1][0], 40] ^= 1
            return copy(transfer)

        substrate.copy = flipped

    words = ("abcd", "klmn", "pqrs", "uvwx", "abcde")
    settings = [*tiers(10, 60), *rooms, "checkpoint=last"]
    outcome = serve(plan(tmp_path, *HYBRID, *settings), in_turn(*words), meddle=flip)
    assert outcome.hit_pages[4].sum() == 4
    found = outcome.hardware
    assert (found["wrong_words"], found["wrong_states"], found["wrong_pages"]) == (1, 1, 0)
    with pytest.raises(WrongResult, match="1 words in 0 of 4 reused pages and 1 of 1 reused states are wrong"):
        check_verified(outcome.hardware)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["tiers.cpu.capacity=20pages", "tiers.disk.capacity=20pages", "disk.folder=kept"],
            "disk.folder: recurrent states cannot",
        ),
        (["hardware.gpus=2"], "model.recurrent_layers: on hardware, one GPU computes such a model"),
        (["model.state_dtype_bytes=1"], "model.state_dtype_bytes must be 2"),
    ],
)
def test_what_hardware_cannot_do_with_states_is_refused(words, problem, tmp_path):
    words = [f"+{word}" if word.startswith("model.state_dtype") else word for word in words]
    with pytest.raises(UsageError, match=problem):
        serve(plan(tmp_path, *HYBRID, *tiers(20), "checkpoint=every_page", *words), in_turn("ab"))
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_validation_of_a_hybrid_model_hits_the_same(tmp_path, monkeypatch):
    prompts = [list(range(13)), [*range(12), 99], [*range(8), 7, 7, 7, 7, 7]]
    lines = [{"timestamp": 3000 * at, "token_ids": ids, "output_length": 2} for at, ids in enumerate(prompts)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, *HYBRID, "trace=tokens", "trace.path=trace.jsonl", "output=run", *tiers(20, 20), *OWN, "hardware=h200"]
    words += ["checkpoint=every_page", "validate.ttft_p50=2", "validate.ttft_p99=2"]
    assert main(["validate", *words]) == 0
    record = json.loads(Path("run/validate.json").read_text())
    assert record["identical"] == 1 and record["hit_rate"]["gpu"]["error"] == 0
    measured = json.loads(Path("run/hardware/result.json").read_text())
    assert measured["hit_pages"]["gpu"] == 4 and measured["hardware"]["verified_states"] == 2
    assert np.isfinite(measured["ttft_s"]["mean"])
