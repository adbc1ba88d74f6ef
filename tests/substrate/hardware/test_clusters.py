"""Whole runs of several engines on real memory: decisions are those of a simulation, and what is reused is right."""

import os
import signal

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvsim.cli import main  # noqa: E402
from tests.engine.small import ask, make_requests  # noqa: E402
from tests.substrate.hardware.small import PAGE_BYTES, PAGE_TOKENS, SMALL, in_turn, plan, serve, tiers  # noqa: E402

STORY = ("abcd", "abcx", "klmn", "abcdef", "pqr", "klmn")


def test_two_engines_share_the_host_and_decide_as_simulated(tmp_path):
    """Requests take turns, so each engine finds what the other one has written down."""
    settings = [*tiers(8, 8, 40), "cluster.engines=2"]
    real = serve(plan(tmp_path, *settings), in_turn(*STORY))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn(*STORY))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert real.hit_pages.sum(axis=0)[1:].all(), "pages come from host memory and from disk"
    assert real.tiers == simulated.tiers and real.placement == simulated.placement
    moved = {name: link.bytes for name, link in real.links.items()}
    assert moved == {name: link.bytes for name, link in simulated.links.items()}
    found = real.hardware
    assert (found["gpus"], found["lost_gpus"], found["disk_faults"]) == (2, [], {})
    assert (found["verified_pages"], found["wrong_words"]) == (real.hit_pages.sum(), 0)
    assert found["page_moves"] == {name: n_bytes // PAGE_BYTES for name, n_bytes in moved.items()}


@pytest.mark.long
def test_engines_with_their_own_cpu_tiers_keep_apart(tmp_path):
    settings = [*tiers(8, 8), "cluster.engines=2", "tiers.cpu.scope=engine"]
    real = serve(plan(tmp_path, *settings), in_turn("abcd", "klmn", "pqrs", "tuvw", "abcd", "klmn"))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn("abcd", "klmn", "pqrs", "tuvw", "abcd", "klmn"))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert real.hit_pages.sum() and real.hardware["wrong_words"] == 0
    assert real.hardware["verified_pages"] == real.hit_pages.sum()


def test_a_prompt_is_computed_on_one_gpu_and_decoded_on_another(tmp_path):
    """Its pages are verified when they have come, as are those that the decode engine reuses."""
    asks = [ask(word, 0.1 * at, output=3) for at, word in enumerate(("abcd", "klm", "abcdef"))]
    settings = [*tiers(20, 20), "cluster.engines=2", "cluster.prefill=1", "cluster.decode=1"]
    outcome = serve(plan(tmp_path, *settings), make_requests(asks, PAGE_TOKENS))
    found = outcome.hardware
    assert not outcome.status.any() and found["wrong_words"] == 0
    assert found["page_moves"]["gpu-gpu"] >= 4 + 3, "the first two prompts share nothing"
    assert found["verified_pages"] >= outcome.hit_pages.sum() + 4 + 3 + 6
    assert outcome.links["gpu-gpu"].bytes == found["page_moves"]["gpu-gpu"] * PAGE_BYTES


def test_an_engine_whose_process_is_killed_leaves_its_requests_to_the_other(tmp_path):
    asks = [ask(word, 0.01 * at, output=6) for at, word in enumerate(("abcd", "klm", "abcdef", "abxy"))]

    def kill(substrate):
        process = substrate.gpus[0].pid
        substrate.clock.timeout(0.1).callbacks.append(lambda _: os.kill(process, signal.SIGKILL))

    settings = [*tiers(80, 80), "cluster.engines=2"]
    outcome = serve(plan(tmp_path, *settings), make_requests(asks, PAGE_TOKENS), meddle=kill)
    assert not outcome.status.any(), "every request is served"
    assert outcome.hardware["lost_gpus"] == [0] and outcome.hardware["wrong_words"] == 0


RANKS = ("model.heads=4", "model.kv_heads=2", "hardware.gpus=2")
"""Two ranks, each with one KV head: 512 bytes of a page per layer, as a single GPU has in the other tests."""


def test_two_ranks_keep_their_shares_of_every_page_and_decide_as_simulated(tmp_path):
    settings = [*tiers(8, 8, 40), *RANKS]
    story = "abcd", "abcx", "klmn", "abcdef", "pq", "klmno", "abcx"
    real = serve(plan(tmp_path, *settings), in_turn(*story))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn(*story))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert real.hit_pages.sum(axis=0).all(), "all three tiers are hit"
    moved = {name: link.bytes for name, link in real.links.items()}
    assert moved == {name: link.bytes for name, link in simulated.links.items()}
    found = real.hardware
    assert (found["gpus"], found["verified_pages"], found["wrong_words"]) == (2, real.hit_pages.sum(), 0)


def test_a_model_that_ranks_cannot_share_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "token_ids": [1, 2, 3, 4, 5], "output_length": 1}\n')
    own = [*SMALL, "substrate=hardware", "trace=tokens", "trace.path=trace.jsonl", "output=run", *tiers(10, 10)]
    assert main(["simulate", *own, "hardware.gpus=2"]) == 2
    shown = capsys.readouterr().err
    assert shown == "kvsim: model.kv_heads=1 cannot be shared by hardware.gpus=2\n"
