import io

from rich.console import Console

from kvsim.engine.outcome import Disagreement, Outcome
from kvsim.report.summary import facts, settings, shares
from kvsim.report.table import print_result
from kvsim.results.rates import digits
from kvsim.results.result import summarize


def printed(outcome: Outcome, *, warmup: float = 0.0, encoding: str = "utf-8", width: int = 100, gpus: int = 1) -> str:
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding=encoding)
    config = {"hardware": {"gpus": gpus}}
    result = summarize(outcome, command="simulate", config=config, seed=0, warmup=warmup, load_s=0.25, versions={})
    print_result(result, Console(file=text, width=width))
    text.flush()
    return raw.getvalue().decode(encoding)


def test_rates_come_with_what_they_are_rates_of(replayed: Outcome):
    text = printed(replayed)
    assert "55.56% of 135 prompt tokens, 57.14% of 14 pages, 66.67% of 3 requests" in text
    assert "A hit is a prompt token reused at admission" in text
    assert "4 counted, 1 rejected" in text


def test_the_warmup_is_told(replayed: Outcome):
    text = printed(replayed, warmup=0.5)
    assert "2 counted after a warm-up of 2, 1 rejected" in text
    assert "exclude the warm-up" in " ".join(text.split())


def test_tiers_links_and_times_have_a_table_each(simulated: Outcome):
    lines = [" ".join(line.split()) for line in printed(simulated).splitlines()]
    assert "gpu 4 4 11 7 30 25.00%" in lines
    assert "cpu unlimited 9 9 0 10 8.33%" in lines
    assert "cpu_to_gpu 3.00 2 3.00 30.00%" in lines
    assert "time to first token 3.00 2.00 5.20 5.92" in lines


def test_without_a_clock_there_is_no_table_of_times(replayed: Outcome):
    assert "time to first token" not in printed(replayed)


def test_counters_are_shown_where_there_are_any(simulated: Outcome):
    simulated.prefetch = {"fetched_pages": 1200, "refused_by_threshold_pages": 3, "refused_by_memory_pages": 2}
    assert "1,200 pages fetched, 3 refused by the threshold, 2 for lack of memory" in printed(simulated)
    assert "checkpoints" not in printed(simulated)


def test_pages_that_ranks_lost_are_shown_where_there_are_any(simulated: Outcome):
    assert "disagreement" not in printed(simulated, gpus=2)
    simulated.lost_to_disagreement = Disagreement(pages=1200, transfers=3)
    assert "ranks 1,200 pages lost to disagreement in 3 transfers" in " ".join(printed(simulated, gpus=2).split())


def test_no_line_is_longer_than_100_columns(simulated: Outcome):
    assert max(map(len, printed(simulated, width=200).splitlines())) <= 100


def test_a_terminal_that_knows_ascii_only_gets_ascii(simulated: Outcome):
    assert "# gpu 25.00%" in printed(simulated, encoding="ascii")


def test_the_bar_is_drawn_to_scale(simulated: Outcome):
    # 30 of 120 prompt tokens from the GPU, 10 from the CPU: 18 and 6 of 72 marks.
    assert "█" * 18 + "▓" * 6 + "·" * 48 in printed(simulated)


def test_shares_leave_out_tiers_that_the_run_did_not_have(simulated: Outcome):
    result = summarize(simulated, command="simulate", config={}, seed=0, warmup=0, load_s=0, versions={})
    assert [name for name, _ in shares(result)] == ["gpu", "cpu", "computed"]


def test_measured_numbers_have_three_digits():
    assert [digits(x) for x in (12345.6, 12.345, 0.02, 0.0, 2e-5, None)] == ["12,346", "12.3", "0.0200", "0", "2e-05", "-"]


def test_settings_are_lines_of_dotted_keys():
    config = {"page_tokens": 16, "tiers": {"gpu": {"capacity": "4pages"}}, "limit": None, "empty": {}}
    assert settings(config) == ["page_tokens=16", "tiers.gpu.capacity=4pages", "limit=null", "empty={}"]


def test_real_hardware_says_what_it_verified(simulated: Outcome) -> None:
    simulated.hardware = {"device": "NVIDIA H200", "verified_pages": 1200, "wrong_words": 0, "disk_faults": {"checksum": 2}}
    shown = " ".join(printed(simulated).split())
    assert "NVIDIA H200, 1,200 reused pages verified, 0 wrong words, disk checksum 2" in shown
    assert "in real time" in shown and "simulated" not in shown.partition("seconds")[0].replace("kvsim simulate", "")


def test_a_count_that_two_parts_of_a_result_share_is_printed_once(simulated: Outcome) -> None:
    """Pages fetched for waiting requests are all pages fetched, unless running ones have fetched some, too."""
    simulated.prefetch = {"fetched_pages": 7, "used_pages": 5}
    for fetched, times in ((7, 1), (9, 2)):
        simulated.placement = {"fetched_pages": fetched, "loaded_pages": 3}
        result = summarize(simulated, command="simulate", config={}, seed=0, warmup=0.0, load_s=0.0, versions={})
        told = dict(facts(result))
        assert (told["prefetch"] + told["placement"]).count(" fetched") == times
