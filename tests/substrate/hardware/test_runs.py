"""Whole runs on real memory: what is reused holds what was computed, and what is decided is what a simulation decides."""

import gc
import json
import threading
import time
import weakref
from concurrent.futures import Future
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import kvsim  # noqa: E402
from kvsim.cli import main  # noqa: E402
from kvsim.core.request import Request  # noqa: E402
from kvsim.errors import WrongResult  # noqa: E402
from kvsim.run.play import check_verified  # noqa: E402
from kvsim.substrate.hardware.memory import tier_copy  # noqa: E402
from kvsim.substrate.hardware.memory.patterns import Patterns  # noqa: E402
from tests.engine.small import ask, make_requests  # noqa: E402
from tests.substrate.hardware.small import PAGE_BYTES, PAGE_TOKENS, SMALL, in_turn, plan, serve, tiers  # noqa: E402

STORY = ("abcd", "abcx", "klmn", "abcdef", "pq", "klmno", "abcx")
HITS = ("identical hits", "hit_rate gpu")
EAGER = ("prefetch=threshold", "prefetch.min_tokens=1", "prefetch.load_min_tokens=0", "prefetch.in_flight_fraction=1.0")


@pytest.fixture(autouse=True)
def _no_thread_outlives_a_run():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("placement", ["write_through", pytest.param("write_back", marks=pytest.mark.long)])
def test_one_at_a_time_all_is_as_simulated_and_every_reused_page_is_right(placement, tmp_path):
    settings = [*tiers(8, 8, 40), f"placement={placement}"]
    real = serve(plan(tmp_path, *settings), in_turn(*STORY))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn(*STORY))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist()
    assert real.hit_pages.sum(axis=0).all(), "all three tiers are hit"
    assert real.tiers == simulated.tiers and real.placement == simulated.placement
    assert bytes_of(real) == bytes_of(simulated)
    found = real.hardware
    assert found["wrong_words"] == 0 and found["disk_faults"] == {}
    assert found["verified_pages"] == real.hit_pages.sum()
    assert found["page_moves"] == {name: n_bytes // PAGE_BYTES for name, n_bytes in bytes_of(real).items()}
    assert real.phases_s.sum(axis=1) == pytest.approx(real.ttft_s)
    assert (real.phases_s >= 0).all()


@pytest.mark.long
def test_pages_of_latents_are_as_simulated_and_right(tmp_path):
    latents = ["model.kv_heads=0", "model.head_dim=0", "+model.kv_latent_dim=24", "+model.rope_dim=8", "+model.nope_dim=8"]
    settings = [*tiers(8, 30), *latents, "+model.value_dim=8", "+model.query_latent_dim=16"]
    real = serve(plan(tmp_path, *settings), in_turn(*STORY[:4], "klmno"))
    simulated = serve(plan(tmp_path, *settings, substrate="simulated"), in_turn(*STORY[:4], "klmno"))
    assert real.hit_pages.tolist() == simulated.hit_pages.tolist() and real.hit_pages[:, 1].sum() > 0
    assert bytes_of(real) == bytes_of(simulated)
    assert (real.hardware["verified_pages"], real.hardware["wrong_words"]) == (real.hit_pages.sum(), 0)


def bytes_of(outcome):
    return {name: link.bytes for name, link in outcome.links.items()}


def test_many_at_a_time_reuse_right_pages(tmp_path, monkeypatch):
    """Small steps, so that chunks of several requests mix with decodes, and loads in parts, so that layers wait for theirs."""
    monkeypatch.setattr(tier_copy, "PART_BYTES", 1)
    asks = [ask(word, 0.1 * at, output=2) for at, word in enumerate(("abcd", "klm", "abcdef", "abxy", "klmno", "abcdef"))]
    settings = [*tiers(12, 12, 40), *EAGER, "engine.max_batch_tokens=14", "placement=write_back"]
    outcome = serve(plan(tmp_path, *settings), make_requests(asks, PAGE_TOKENS))
    assert not outcome.status.any() and outcome.hardware["wrong_words"] == 0
    assert outcome.hardware["verified_pages"] >= outcome.hit_pages.sum() > 0
    assert (outcome.ttft_s > 0).all() and (outcome.e2e_s >= outcome.ttft_s).all() and (outcome.tpot_s > 0).all()
    for link in outcome.links.values():
        assert 0 < link.busy_s <= outcome.simulated_s + 5
        assert (link.intervals[:, 1] >= link.intervals[:, 0]).all() and len(link.intervals) == link.transfers


@pytest.mark.gpu
def test_on_a_gpu_loads_and_steps_overlap_and_pages_are_right(tmp_path, monkeypatch):
    """Layers wide enough to take a while, in bf16, beside copies both ways and a disk."""
    monkeypatch.setattr(tier_copy, "PART_BYTES", 1 << 16)
    wide = ["model.layers=8", "model.hidden_size=1024", "model.heads=8", "model.kv_heads=8", "model.head_dim=128"]
    wide += ["model.mlp_width=4096", "model.kv_dtype_bytes=2", "model.weight_dtype_bytes=2"]
    words = ["".join(chr(ord("a") + (seed * step) % 26) for step in range(1, 40)) for seed in (1, 3, 5, 1, 7, 9, 3, 5, 11, 1)]
    asks = [ask(word[: 20 + number], 0.01 * number, output=8) for number, word in enumerate(words)]
    outcome = serve(plan(tmp_path, *tiers(80, 100, 400), *EAGER, *wide), make_requests(asks, PAGE_TOKENS))
    assert not outcome.status.any() and outcome.hit_pages[:, 1:].sum() > 0
    assert outcome.hardware["wrong_words"] == 0 and outcome.hardware["verified_pages"] >= outcome.hit_pages.sum()
    for link in outcome.links.values():
        assert link.busy_s <= outcome.simulated_s + 1


def test_pages_of_answers_are_filled_before_they_are_reused(tmp_path):
    """The first answer completes the prompt's third page and one more, which the second prompt goes on with."""
    first = Request(
        index=0, arrival_s=0.0, prompt_tokens=10, output_tokens=8, runs=((0, 2),), prompt_pages=2, output_runs=((2, 2),)
    )
    second = Request(
        index=1, arrival_s=0.0, prompt_tokens=19, output_tokens=1, runs=((0, 4),), prompt_pages=4, output_runs=(), after=0
    )
    outcome = serve(plan(tmp_path, *tiers(20), "rules.cache_output=true"), [first, second])
    assert outcome.hit_pages[1].tolist() == [4, 0, 0]
    assert (outcome.hardware["verified_pages"], outcome.hardware["wrong_words"]) == (4, 0)


def test_a_retracted_request_computes_again_what_is_gone(tmp_path):
    """Two requests of 6 pages each in the end do not fit into 11."""
    requests = make_requests([ask("abcd", output=6), ask("klmn", output=6)], PAGE_TOKENS)
    outcome = serve(plan(tmp_path, *tiers(11, 8)), requests)
    assert outcome.retractions and not outcome.status.any() and outcome.hardware["wrong_words"] == 0


def after_reading(substrate, change):
    """Let something happen to the first page of every read from disk, after its checksum was compared."""
    read = substrate.disk.read

    def meddled(slots, keys, host, host_slots, *, cancelled):
        answer: Future[int] = Future()
        answer.set_result(change(read(slots, keys, host, host_slots, cancelled=cancelled).result(), host[host_slots[0]]))
        return answer

    substrate.disk.read = meddled


def test_a_page_that_has_changed_is_found_out(tmp_path):
    def flip(pages, row):
        row[700] ^= 1
        return pages

    outcome = serve(
        plan(tmp_path, *tiers(5, 5, 30)), in_turn("abcd", "klmn", "pqrs", "abcd"), meddle=lambda real: after_reading(real, flip)
    )
    assert outcome.hit_pages[3].tolist() == [0, 0, 4]
    assert (outcome.hardware["wrong_words"], outcome.hardware["wrong_pages"]) == (1, 1)
    with pytest.raises(WrongResult, match="1 words in 1 of 4 reused pages are wrong"):
        check_verified(outcome.hardware)


def test_what_the_disk_does_not_deliver_is_computed(tmp_path):
    """The file is damaged in the third page of the first prompt: two pages are hit, the others are filled anew."""

    def damage(substrate):
        write = substrate.disk.write
        path = tmp_path / "run" / "disk" / "pages.data"

        def damaged(slots, keys, host, host_slots, *, cancelled):
            answer = write(slots, keys, host, host_slots, cancelled=cancelled)
            answer.result()
            if not damages:
                damages.append(slots[2])
                with path.open("r+b") as file:
                    file.seek(int(slots[2]) * substrate.disk.slot_bytes + 100)
                    file.write(b"other")
            return answer

        substrate.disk.write = damaged

    damages: list[int] = []
    requests = in_turn("abcd", "klmn", "pqrs", "abcd", "abcd")
    outcome = serve(plan(tmp_path, *tiers(5, 5, 30)), requests, meddle=damage)
    assert outcome.hit_pages[3].tolist() == [0, 0, 2]
    assert outcome.hit_pages[4].tolist() == [4, 0, 0]
    found = outcome.hardware
    assert found["disk_faults"] == {"checksum": 1}
    assert (found["verified_pages"], found["wrong_words"]) == (2 + 4, 0)


def test_a_fetch_is_cancelled_when_its_request_is_admitted(tmp_path):
    """The read waits until it is cancelled; what has arrived by then, two pages, is kept."""
    reads: list[bool] = []

    def slow(substrate):
        read = substrate.disk.read

        def waiting(slots, keys, host, host_slots, *, cancelled):
            answer: Future[int] = Future()

            def carry():
                pages = read(slots[:2], keys[:2], host, host_slots[:2], cancelled=lambda: False).result()
                while not cancelled():
                    threading.Event().wait(0.001)
                reads.append(True)
                answer.set_result(pages)

            threading.Thread(target=carry).start()
            return answer

        substrate.disk.read = waiting

    requests = in_turn("abcd", "klmn", "pqrs", "abcd")
    settings = [*tiers(5, 5, 30), *EAGER, "prefetch.base_s=0.05", "prefetch.per_1024_tokens_s=0"]
    outcome = serve(plan(tmp_path, *settings), requests, meddle=slow)
    assert reads == [True]
    assert outcome.hit_pages[3].tolist() == [0, 0, 2] and outcome.hardware["wrong_words"] == 0


def test_pages_on_disk_outlive_a_run(tmp_path):
    settings = [*tiers(8, 8, 40), f"disk.folder={tmp_path / 'kept'}"]
    first = serve(plan(tmp_path, *settings), in_turn("abcd"))
    assert first.hardware["restored_pages"] == 0
    second = serve(plan(tmp_path, *settings), in_turn("abcdef"))
    assert second.hardware["restored_pages"] == 4 and second.hit_pages.tolist() == [[0, 0, 4]]
    assert (second.hardware["verified_pages"], second.hardware["wrong_words"]) == (4, 0)


@pytest.mark.parametrize("where", ["disk", "compute", "load"])
def test_a_thread_that_fails_ends_the_run(where, tmp_path):
    def break_it(substrate):
        def broken(*_, **__):
            raise OSError(5, f"{where} is broken")

        if where == "disk":
            substrate.disk.write = broken
        elif where == "compute":
            substrate.gpus[0].compute_queue.transformer.step = broken
        else:
            substrate.gpus[0].links["load"].tiers.load = broken

    with pytest.raises(OSError, match=f"{where} is broken"):
        serve(plan(tmp_path, *tiers(5, 12, 30)), in_turn("abcd", "klmn", "abcd"), meddle=break_it)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["page_tokens=3"],
            "page_tokens: a fragment (a page's bytes in one layer) must be a multiple of 16 bytes and at least 512",
        ),
        (["tiers.cpu.capacity=100TiB"], "tiers.cpu.capacity: 102,400.0 GiB, more than the "),
        (
            ["tiers.gpu.capacity=100TiB"],
            "tiers.gpu.capacity: 102,400.0 GiB of KV and 0.0 GiB of weights do not fit into",
        ),
        (
            ["model=deepseek_v3", "model.weight_dtype_bytes=0.1", "tiers.gpu.capacity=10pages"],
            "model.weight_dtype_bytes must be 2 (bf16) or 4 (float32) on hardware, not 0.1",
        ),
        (["disk.folder=trace.jsonl", *tiers(10, 10, 10)[1:]], "disk.folder: cannot write to trace.jsonl"),
        (["tiers.disk.capacity=1000TiB", "tiers.cpu.capacity=10pages"], "tiers.disk.capacity: 1,024,000.0 GiB, more than"),
    ],
)
def test_what_the_machine_has_not_is_said_in_one_line(words, problem, trace, capsys):
    names = {word.split("=")[0] for word in words}
    own = [word for word in [*trace, *tiers(10)] if word.split("=")[0].split(".")[0] != "model" or "model" not in names]
    assert main(["simulate", "substrate=hardware", *(word for word in own if word.split("=")[0] not in names), *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"kvsim: {problem}") and shown.count("\n") == 1
    assert not Path("run/disk").exists() and not Path("run/result.json").exists()


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """Two prompts that share three pages; overrides that name them."""
    lines = [
        {"timestamp": 0, "token_ids": list(range(13)), "output_length": 2},
        {"timestamp": 50, "token_ids": [*range(12), 99], "output_length": 1},
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    return [*SMALL, "trace=tokens", "trace.path=trace.jsonl", "output=run"]


def test_the_command_writes_the_record_and_removes_the_disk_file(trace):
    assert main(["simulate", *trace, *tiers(10, 10, 10), "substrate=hardware", "timeline=true"]) == 0
    record = json.loads(Path("run/result.json").read_text())
    assert record["hit_pages"] == {"gpu": 3, "cpu": 0, "disk": 0}
    assert record["hardware"]["verified_pages"] == 3 and record["hardware"]["wrong_words"] == 0
    assert sorted(path.name for path in Path("run").iterdir()) == [
        "report.html",
        "requests.csv.gz",
        "result.json",
        "timeline.json.gz",
    ]


def test_wrong_words_end_the_command_with_1_after_the_record_is_written(trace, monkeypatch, capsys):
    monkeypatch.setattr(Patterns, "fill", lambda self, slots, page_ids: None)
    assert main(["simulate", *trace, *tiers(10), "substrate=hardware"]) == 1
    assert json.loads(Path("run/result.json").read_text())["hardware"]["wrong_pages"] == 3
    assert "in 3 of 3 reused pages are wrong" in capsys.readouterr().err


def test_a_validation_runs_both_and_ends_with_1_beyond_its_tolerances(trace, capsys):
    """An interpreter takes longer than the H200 that is simulated."""
    words = ["validate", *trace, *tiers(10), "hardware=h200"]
    assert main(words) == 1
    assert "the simulation is outside its tolerances: ttft_p50 is -" in capsys.readouterr().err
    record = json.loads(Path("run/validate.json").read_text())
    assert record["identical"] == 1 and record["hit_rate"]["gpu"]["error"] == 0
    for name in ("simulated", "hardware"):
        assert json.loads(Path(f"run/{name}/result.json").read_text())["config"]["substrate"] == name
    assert main([*words, "validate.ttft_p50=2", "validate.ttft_p99=2"]) == 0


def test_repeated_real_runs_are_recorded_and_compared_again_without_hardware(trace, capsys, monkeypatch):
    """The interpreter is no H200: every time is off, every hit the same. Of two runs, a busy host may make one twice as long."""
    words = ["validate", *trace, *tiers(10), "hardware=h200"]
    assert main([*words, "validate.runs=3"]) == 1
    shown = capsys.readouterr()
    assert "1 simulation and 3 runs on " in shown.out and "no measured noise" in shown.out
    assert "the simulation is outside its tolerances: ttft_p50 is off by -" in shown.err
    record = json.loads(Path("run/validate.json").read_text())
    assert [figure["is_off"] for figure in record["figures"] if figure["name"] in HITS] == [False, False]
    assert [json.loads(Path(f"run/hardware/{number}/result.json").read_text())["requests"] for number in (1, 2, 3)] == [2] * 3
    assert main(words) == 2
    assert "run/hardware/1 is a real run of another validation" in capsys.readouterr().err
    monkeypatch.setattr("kvsim.substrate.hardware.device.find_device", lambda: pytest.fail("recordings need no device"))
    again = [*words, "validate.measured=run/hardware", "output=again", "hardware.step_overhead_s=1e-3"]
    assert main(again) == 1
    assert sorted(path.name for path in Path("again").iterdir()) == ["simulated", "validate.html", "validate.json"]
    assert json.loads(Path("again/validate.json").read_text())["measured"] == [f"run/hardware/{number}" for number in (1, 2, 3)]
    noise = "+hardware.noise={prefill_steps:{run:0.1,each:[[0,0.5],[1,2.0]]},seed:5}"
    assert main([*words, "validate.measured=run/hardware", "output=noisy", noise, "validate.simulations=3"]) == 1
    assert json.loads(Path("noisy/validate.json").read_text())["simulations"] == 3
    runs = [json.loads(Path(f"noisy/simulated/{number}/result.json").read_text()) for number in (1, 2, 3)]
    assert [run["config"]["hardware"]["noise"]["seed"] for run in runs] == [5, 6, 7]
    assert len({run["ttft_s"]["p50"] for run in runs}) == 3
    capsys.readouterr()
    assert main([*words, "validate.measured=[run/hardware]", "output=again", "tiers.gpu.capacity=9pages"]) == 2
    assert "the two runs differ in tiers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "hardware: set hardware=NAME"),
        (["hardware=h200", "substrate=hardware"], "substrate has no effect on kvsim validate"),
        (["hardware=h200", "validate.simulations=1"], "validate.simulations must be at least 2"),
        (["hardware=h200", "validate.simulations=9"], "validate.simulations has no effect with a single real run"),
        (
            ["hardware=h200", "validate.runs=2", "validate.simulations=9"],
            "validate.simulations has no effect on a machine without",
        ),
        (["hardware=h200", "validate.runs=2", "validate.measured=x"], "validate.runs has no effect with validate.measured"),
        (["hardware=h200", "validate.measured=x"], "validate.measured: there is no folder x"),
        (["hardware=h200", "-m"], "-m: kvsim validate takes a single configuration"),
    ],
)
def test_a_validation_says_what_it_needs(words, problem, trace, capsys):
    assert main(["validate", *trace, *tiers(10), *words]) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: {problem}")
    assert not Path("run").exists()


def test_memory_is_given_back_at_once(tmp_path):
    """Not when the garbage collector finds it: the next job of a sweep needs it."""
    pools = []

    def remember(substrate):
        gpu = substrate.gpus[0]
        parts = gpu.pool.pages, gpu.links["load"].tiers.host, gpu.compute_queue.transformer
        pools.extend(weakref.ref(part) for part in parts)

    gc.disable()
    try:
        serve(plan(tmp_path, *tiers(8, 8, 8)), in_turn("ab", "abc"), meddle=remember)
        assert [part() for part in pools] == [None, None, None]
    finally:
        gc.enable()


def test_an_interrupt_ends_a_run_in_the_middle_of_a_leap(tmp_path):
    def interrupt(substrate):
        substrate.clock.timeout(1.0).callbacks.append(lambda _: (_ for _ in ()).throw(KeyboardInterrupt))

    requests = make_requests([ask("abcd", output=200)], PAGE_TOKENS)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        serve(plan(tmp_path, *tiers(80)), requests, meddle=interrupt)
    assert time.monotonic() - began < 30


def test_a_trace_in_memory_is_served_and_its_pages_on_disk_outlive_a_run(tmp_path):
    """The second trace goes on with the first prompt: the same tokens have the same pages on disk."""
    settings = [
        *SMALL[:-1],
        "substrate=hardware",
        *tiers(8, 8, 40),
        f"disk.folder={tmp_path / 'kept'}",
        f"output={tmp_path / 'run'}",
    ]
    first = kvsim.trace_from_tokens([list(range(17))], page_tokens=PAGE_TOKENS)
    second = kvsim.trace_from_tokens([[7] * 9, [*range(16), 3]], page_tokens=PAGE_TOKENS)
    assert kvsim.simulate(first, *settings).record["hardware"]["restored_pages"] == 0
    result = kvsim.simulate(second, *settings)
    assert result.hit_pages.tolist() == [[0, 0, 0], [0, 0, 4]]
    assert (result.record["hardware"]["restored_pages"], result.record["hardware"]["verified_pages"]) == (4, 4)


def test_requests_of_a_program_are_served_and_found_by_their_page_ids(tmp_path):
    def trace(*words):
        return kvsim.Trace(name="own", requests=in_turn(*words), page_tokens=PAGE_TOKENS, block_tokens=None)

    settings = [*SMALL[:-1], "substrate=hardware", *tiers(8, 8, 40), f"disk.folder={tmp_path / 'kept'}"]
    runs = [kvsim.simulate(trace(*words), *settings) for words in (["abcd"], ["abcd"], ["ab", "cd"])]
    assert [run.record["hardware"]["restored_pages"] for run in runs] == [0, 4, 0]
    assert [run.hit_pages.sum() for run in runs] == [0, 4, 0]
