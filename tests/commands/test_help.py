"""``kvsim help`` and ``--help``."""

import re

import pytest

from kvsim.cli import COMMANDS, main
from kvsim.commands.help import WITH_HELP
from kvsim.settings import catalog
from kvsim.settings.other_words import OTHER_WORDS


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["simulate", "replay"])
def test_help_of_a_run_lists_groups_settings_and_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, command, "--help")
    assert f"usage: kvsim {command} [KEY=VALUE ...] [-m]" in text
    assert re.search(r"  eviction +lru, arc, .*\bslru", text, re.DOTALL)
    assert re.search(r"  page_tokens=16 +Tokens of one page", text)
    assert "-m, --multirun" in text


@pytest.mark.parametrize("command", WITH_HELP)
def test_settings_without_effect_are_left_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, command, "--help")
    assert ("  replay.in_flight=1" in text) == (command in ("replay", "shadow", "leaderboard", "train"))
    assert ("  scheduling " in text) == (command in ("simulate", "validate", "saturate", "plan", "serve", "leaderboard"))
    assert "hydra." not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, command, "--help").startswith(("usage: ", "usage: kvsim"))


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = shown(capsys, "help", "eviction", "eviction=slru", "tiers", "preset=sglang_hicache")
    text += shown(capsys, "simulate", "--help").partition("Groups:")[2]
    long = [line for line in text.splitlines() if len(line) > columns and " " in line.strip()]
    assert all("=" in line.split()[0] or line.endswith(".") or ": " in line for line in long), long
    assert set(re.findall(r"\w+", shown(capsys, "help", "slru"))) <= set(re.findall(r"\w+", text))


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("eviction", r"^eviction=NAME: which pages leave a tier first. Default: lru\.\n(.|\n)*\n  slru +Pages used once"),
        ("eviction=slru", r"^eviction=slru\n  Pages used once .*\n\neviction.protected_hits=2\n    Uses after which"),
        ("slru", r"^eviction=slru\n"),
        ("none", r"^prefetch=none\n(.|\n)*\ncheckpoint=none\n(.|\n)*\nlogger=none\n"),
        ("tiers.gpu.capacity", r"^tiers.gpu.capacity=40GiB\n    Capacity: 6000pages"),
        ("cluster", r"^cluster\n(.|\n)*\ncluster.engines=1\n"),
        ("disk", r"^disk\n(.|\n)*\n\nSee also: kvsim help tiers\.disk\.\n$"),
        ("prefetch.stop", r"^prefetch.stop=timeout\n    How long a request waits"),
        ("preset=sglang_hicache", r"  rules=sglang\n(.|\n)*  tiers.cpu.capacity=80GiB\n      --hicache-ratio 2"),
        ("--cfg", r"^  --cfg  Show the configuration"),
        ("replay", r"^usage: kvsim replay"),
    ],
)
def test_a_topic_is_described(topic: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(expected, shown(capsys, "help", topic))


def test_a_topic_may_follow_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "replay", "--help", "eviction=slru") == shown(capsys, "help", "eviction=slru")


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        ("evictoin", "there is no group, choice or setting 'evictoin'; did you mean eviction?"),
        ("capacity", "there is no group, choice or setting 'capacity'; did you mean tiers.gpu.capacity, tiers.cpu.capacity or"),
        ("eviction=slur", "eviction=slur: there is no such choice; did you mean slru? choose from "),
        ("simluate", "there is no group, choice or setting 'simluate'; did you mean simulate?"),
        ("zzzzzz", "there is no group, choice or setting 'zzzzzz'; kvsim help NAME describes"),
    ],
)
def test_an_unknown_topic_ends_with_a_suggestion(topic: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", topic]) == 2
    assert capsys.readouterr().err.startswith(f"kvsim: {expected}")


def test_every_choice_and_every_setting_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for group in catalog.GROUPS:
        choices = [f"{group}={name}" for name in catalog.choices(group)]
        parts = re.split(rf"^(?={group}=\w+$)", shown(capsys, "help", *choices), flags=re.MULTILINE)
        assert [part.partition("\n")[0] for part in parts[1:]] == choices
        assert all(part.count("\n") >= 2 for part in parts[1:])
    for setting in list(catalog.all_settings())[::5]:
        assert setting.key in shown(capsys, "help", setting.key)


def test_the_groups_are_those_of_the_folders() -> None:
    assert set(catalog.GROUPS) == {path.name for path in catalog.KVSIM.iterdir() if path.is_dir() and path.name != "__pycache__"}


@pytest.mark.parametrize(
    ("comment", "sentence"),
    [
        ("Capacity, as for the GPU. 0: no CPU tier.", "Capacity, as for the GPU. 0: no CPU tier"),
        ("SGLang's cache (HiCache): GPU and host. Its others: x.", "SGLang's cache (HiCache)"),
        ("One line\nand more. Then another.", "One line and more"),
        ("", ""),
    ],
)
def test_a_comment_begins_with_one_sentence(comment: str, sentence: str) -> None:
    assert catalog.first_sentence(comment) == sentence


def test_files_of_results_and_what_is_in_them_are_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r"  page_hit_rate +hit pages over prompt pages", shown(capsys, "help", "result.json"))
    columns = shown(capsys, "help", "requests.csv.gz")
    assert "hit_pages_gpu, hit_pages_cpu, hit_pages_disk" in columns and "  ttft_s " in columns
    assert shown(capsys, "help", "ttft_s").count("  ttft_s ") == 2, "of a run, and of a request"


def test_a_word_that_begins_fields_or_settings_leads_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "hit"]) == 0
    shown = capsys.readouterr().out
    assert "hit_rate" in shown and "hit tokens over prompt tokens" in " ".join(shown.split())
    assert main(["help", "hardware.disk"]) == 2
    assert "did you mean hardware.disk_read_bytes_per_s or" in capsys.readouterr().err


def test_words_of_the_field_lead_to_kvsim_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "SSD"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        "SSD is not a word of kvsim's; what it may mean: tiers.disk.capacity, drive.\n\ntiers.disk.capacity=0\n"
    )
    assert "drive=NAME" in shown
    for word, names in OTHER_WORDS.items():
        assert main(["help", *names]) == 0, word
        assert main(["help", word]) == 0
        assert capsys.readouterr().out.count(f"{word} is not a word") == 1, f"{word} is a name of kvsim's"
