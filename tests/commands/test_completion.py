"""Completion: what the Tab key offers, without Hydra, and that a real bash takes it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvsim.cli import COMMANDS, main
from kvsim.commands import completion
from kvsim.settings.flags import FLAGS

ROOT = Path(__file__).resolve().parent.parent.parent
CONF = ROOT / "conf"


def offered(line: str) -> list[str]:
    return [word for word, _ in completion.complete(line)]


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def test_commands_are_offered_with_what_they_do() -> None:
    assert completion.complete("kvsim ") == list(COMMANDS.items())
    assert offered("kvsim sim") == ["simulate"] and offered("kvsim simulate") == []
    assert offered("kvsim --inst") == ["--install-completion"]


@pytest.mark.parametrize("group", ["eviction", "model", "preset", "trace"])
def test_a_group_offers_all_its_choices(group: str) -> None:
    assert offered(f"kvsim replay {group}=") == [f"{group}={name}" for name in names(group)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvsim replay evi", ["eviction="]),
        ("kvsim replay eviction=slr", ["eviction=slru"]),
        ("kvsim replay -m eviction=lru,slr", ["eviction=lru,slru"]),
        ("kvsim replay eviction@", [f"eviction@tiers.{tier}.eviction=" for tier in ("gpu", "cpu", "disk", "remote")]),
        ("kvsim replay eviction@tiers.cpu.eviction=ar", ["eviction@tiers.cpu.eviction=arc"]),
        ("kvsim replay tie", ["tiers."]),
        ("kvsim replay tiers.g", ["tiers.gpu."]),
        ("kvsim replay tiers.gpu.c", ["tiers.gpu.capacity="]),
        (
            "kvsim replay tiers.gpu.states=0 tiers.gpu.",
            ["tiers.gpu.capacity=", "tiers.gpu.gpu_memory_utilization=", "tiers.gpu.workspace="],
        ),
        ("kvsim replay eviction=slru eviction.prot", ["eviction.protected_hits=", "eviction.protected_fraction="]),
        ("kvsim replay trace=mooncake trace.ta", ["trace.tail="]),
        ("kvsim replay trace=mooncake trace.tail=f", ["trace.tail=full"]),
        ("kvsim simulate timeline=", ["timeline=true", "timeline=false"]),
        ("kvsim replay tiers.disk.below=", ["tiers.disk.below=cpu", "tiers.disk.below=gpu"]),
        ("kvsim replay ~evict", ["~eviction="]),
        ("kvsim replay --mul", ["--multirun"]),
        ("kvsim replay --cfg ", ["job", "hydra", "all"]),
        ("kvsim replay --package ", []),
        ("kvsim policies evi", ["eviction"]),
        ("kvsim policies eviction slr", ["slru"]),
        ("kvsim help tiers.gpu.c", ["tiers.gpu.capacity"]),
        ("kvsim help eviction=slr", ["eviction=slru"]),
        ("kvsim --install-completion z", ["zsh"]),
        ("kvsim nosuch x", []),
        ("kvsim replay nosuch=", []),
        ("kvsim calibrate ev", []),
    ],
)
def test_a_word_becomes(line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_all_flags_are_offered() -> None:
    assert offered("kvsim simulate -") == list(FLAGS)


def test_files_are_offered_after_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "a.jsonl").touch()
    (tmp_path / ".hidden").touch()
    monkeypatch.chdir(tmp_path)
    assert offered("kvsim replay trace.path=") == ["trace.path=traces/"]
    assert offered("kvsim replay trace.path=traces/") == ["trace.path=traces/a.jsonl"]
    assert offered(f"kvsim replay output={tmp_path}/tr") == [f"output={tmp_path}/traces/"]
    assert offered("kvsim report tr") == ["traces/"]
    assert offered("kvsim replay --config-dir t") == ["traces/"]
    assert offered("kvsim replay trace.path=missing/") == []


def test_choices_of_the_users_own_folder_are_offered(tmp_path: Path) -> None:
    (tmp_path / "eviction").mkdir()
    (tmp_path / "eviction" / "mine.yaml").write_text("# My own.\n_target_: a.B\n\n# How many.\nk: 3\n")
    assert offered(f"kvsim replay --config-dir {tmp_path} eviction=min") == ["eviction=mine"]
    assert offered(f"kvsim replay --config-dir {tmp_path} eviction=mine eviction.") == ["eviction.k="]


def test_an_answer_loads_nothing_that_is_slow() -> None:
    code = "import sys; from kvsim.cli import main; main(['--complete', 'kvsim replay tiers.gpu.']); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert "tiers.gpu.capacity=" in shown
    assert not {"hydra", "numpy", "omegaconf", "rich", "simpy", "yaml", "kvsim.plans.build"} & set(shown.splitlines()[-1].split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvsim replay eviction=lru,slr", ["lru,slru"]),
        ("kvsim replay eviction@tiers.cpu.eviction=slr", ["slru"]),
        ("kvsim replay tiers.gpu.cap", ["tiers.gpu.capacity="]),
    ],
)
def test_bash_completes_the_word_at_the_cursor(line: str, expected: list[str], tmp_path: Path) -> None:
    program = tmp_path / "kvsim"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from kvsim.cli import main; sys.exit(main())"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
    program.chmod(0o755)
    words = line.replace("=", " = ").replace("@", " @ ").split(" ")
    words[0] = str(program)
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f"""
        source "{tmp_path}/script"
        COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({quoted}) COMP_CWORD={len(words) - 1}
        COMP_WORDBREAKS=$' \\t\\n"\\'@><=;|&(:'
        _kvsim; printf '%s\\n' "${{COMPREPLY[@]}}"; complete -p kvsim >&2
    """
    (tmp_path / "script").write_text(completion.script("bash"))
    ran = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == expected
    assert "_kvsim kvsim" in ran.stderr


@pytest.mark.parametrize("shell", completion.SCRIPTS)
def test_installing_twice_changes_nothing(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    assert main(["--install-completion"]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {completion.place(shell)}")
    assert completion.place(shell).read_text() == completion.script(shell)
    assert main(["--install-completion", shell]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert main(["--show-completion", shell]) == 0
    assert "--complete" in capsys.readouterr().out


def test_an_unknown_shell_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--install-completion", "bsh"]) == 2
    assert capsys.readouterr().err == "kvsim: there is no completion for the shell 'bsh'; did you mean bash or zsh?\n"
