"""Completion of command lines in bash, zsh and fish: the scripts, and what they ask for at each Tab.

Imports neither Hydra nor NumPy: an answer takes little longer than Python's start.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kvsim.commands.listing import COMMANDS
from kvsim.errors import UsageError
from kvsim.settings.catalog import FAMILIES
from kvsim.settings.sources import set_up
from kvsim.suggest import closest

SCRIPTS = {
    "bash": """\
# Completion of kvsim for bash, written by: kvsim --install-completion bash
_kvsim() {
    local line="${COMP_LINE:0:COMP_POINT}" word last IFS=$'\\n'
    word="${line##*[[:space:]]}"
    last="${word##*[$COMP_WORDBREAKS]}"
    COMPREPLY=($("${COMP_WORDS[0]}" --complete "$line" 2>/dev/null))
    COMPREPLY=("${COMPREPLY[@]%%$'\\t'*}")
    COMPREPLY=("${COMPREPLY[@]#"${word%"$last"}"}")
    [[ "${COMPREPLY[0]}" == *[=./] ]] && compopt -o nospace 2>/dev/null
    return 0
}
complete -F _kvsim kvsim
""",
    "zsh": """\
#compdef kvsim
# Completion of kvsim for zsh, written by: kvsim --install-completion zsh
_kvsim() {
    local -a found open closed
    found=("${(@f)$("${words[1]}" --complete "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    found=("${(@)found%%$'\\t'*}")
    open=("${(@M)found:#*[=./]}")
    closed=("${(@)found:#*[=./]}")
    compadd -Q -S '' -- ${open:#}
    compadd -Q -- ${closed:#}
}
if [ "$funcstack[1]" = "_kvsim" ]; then _kvsim "$@"; else compdef _kvsim kvsim; fi
""",
    "fish": """\
# Completion of kvsim for fish, written by: kvsim --install-completion fish
complete -c kvsim -f -a '(kvsim --complete (commandline -cp | string collect) 2>/dev/null)'
""",
}
WITH_SETTINGS = ("simulate", "replay", "saturate", "plan", "curve", "leaderboard", "train", "validate", "calibrate", "serve")
SUBCOMMANDS = {"trace": ("info", "convert", "fetch"), "policies": FAMILIES, "new": FAMILIES}
"""First words after the commands that take some."""
PATHS = ("path", "folder", "output", "disk", "results", "prices")
"""Last parts of the keys whose values are files or folders."""
Candidate = tuple[str, str]
"""A word and a few words about it."""


def install(shell: str) -> str:
    """Write the completion script of a shell to the file where the shell looks for it. Returns what was done."""
    shell = shell or Path(os.environ.get("SHELL", "")).name
    text = script(shell)
    path = place(shell)
    if path.is_file() and path.read_text() == text:
        done = f"{path} is up to date"
    else:
        from kvsim.files.writing import replacing

        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text.encode())
        done = f"wrote {path}"
    return f"{done}\n{advice(shell, path)}"


def script(shell: str) -> str:
    """The completion script of a shell. Raises UsageError for a shell that has none."""
    if shell not in SCRIPTS:
        hint = closest(shell, SCRIPTS) or f"; choose from {', '.join(SCRIPTS)}"
        raise UsageError(f"there is no completion for the shell {shell!r}{hint}")
    return SCRIPTS[shell]


def place(shell: str) -> Path:
    """Where a shell looks for the completion of a command when it is first needed."""
    home = Path.home()
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    places = {
        "bash": data / "bash-completion" / "completions" / "kvsim",
        "zsh": data / "zsh" / "site-functions" / "_kvsim",
        "fish": config / "fish" / "completions" / "kvsim.fish",
    }
    return places[shell]


def advice(shell: str, path: Path) -> str:
    """What to do for the script to be read."""
    source = f"source {shlex.quote(str(path))}"
    return {
        "bash": f"New shells read it if bash-completion is installed; otherwise add this line to ~/.bashrc:\n  {source}",
        "zsh": f"Add this line to ~/.zshrc, before compinit:\n  fpath=({shlex.quote(str(path.parent))} $fpath)",
        "fish": "New shells read it.",
    }[shell]


def complete(line: str) -> list[Candidate]:
    """What the last word of a command line, up to the cursor, can become. Never raises an error of the user's."""
    words = line.split()
    current = "" if not words or line[-1:].isspace() else words.pop()
    before = words[1:]
    if not before:
        own = [("--help", ""), ("--version", ""), ("--install-completion", ""), ("--show-completion", "")]
        return _starting(current, [*COMMANDS.items(), *(own if current.startswith("-") else ())])
    if before[-1] in ("--config-dir", "-cd"):
        return _starting(current, _files("", current))
    try:
        return _starting(current, _words(before[0], set_up(before[1:]), current))
    except UsageError:
        return []


def _words(command: str, before: Sequence[str], current: str) -> Iterable[Candidate]:
    """What can follow a command and some words."""
    if command in ("--install-completion", "--show-completion"):
        return [(shell, "") for shell in SCRIPTS]
    if command == "help" or (command in WITH_SETTINGS and {"-h", "--help"} & set(before)):
        return [*(COMMANDS.items() if command == "help" else ()), *_topics(current)]
    if command in WITH_SETTINGS:
        return _configuration(command, before, current)
    if not before and command in SUBCOMMANDS:
        return [(word, "") for word in SUBCOMMANDS[command]]
    if command == "policies" and before[0] in FAMILIES:
        return [(name, "") for name in _choices(before[0])]
    if command == "trace" and "=" in current:
        return _configuration("replay", before, current)
    if command in ("report", "trace"):
        return _files("", current)
    return []


def _configuration(command: str, before: Sequence[str], current: str) -> Iterable[Candidate]:
    """Overrides and flags."""
    from kvsim.settings.flags import FLAGS, SHORT, TAKES_VALUE

    last = SHORT.get(before[-1], before[-1]) if before else ""
    if last in TAKES_VALUE:
        return [(value, "") for value in TAKES_VALUE[last] or ()]
    if current.startswith("-"):
        return FLAGS.items()
    key, has_value, value = current.partition("=")
    return _values(key, value) if has_value else _keys(command, before, key)


def _keys(command: str, before: Sequence[str], key: str) -> Iterator[Candidate]:
    """Groups and settings; those below a section only once the section has been typed."""
    from kvsim.settings import catalog

    overrides = [word for word in before if "=" in word]
    given = {word.partition("=")[0] for word in overrides}
    sign = key[: len(key) - len(key.lstrip("+~"))]
    tiers = catalog.defaults() if "@" in key else {}
    groups = {group: catalog.GROUPS[group] for group in (catalog.OF_CALIBRATE if command == "calibrate" else catalog.GROUPS)}
    for group, purpose in {**groups, **{name: "" for name in tiers if "@" in name}}.items():
        if group not in given:
            yield f"{sign}{group}=", purpose
    seen = set()
    for setting in catalog.all_settings(overrides, "calibrate" if command == "calibrate" else "config"):
        parts = setting.key.split(".")
        depth = key.lstrip("+~").count(".")
        shown = ".".join(parts[: depth + 1]) + ("." if len(parts) > depth + 1 else "=")
        if shown.rstrip("=") not in given and shown not in seen:
            seen.add(shown)
            yield f"{sign}{shown}", catalog.first_sentence(setting.comment) if shown.endswith("=") else ""


def _values(key: str, value: str) -> Iterable[Candidate]:
    """Values of a group or setting; after a comma, one more of a sweep's."""
    from kvsim.settings import catalog

    done = value.rpartition(",")[0]
    start = f"{key}={done}," if done else f"{key}="
    group = key.lstrip("+~").partition("@")[0]
    if group in catalog.GROUPS:
        return [(f"{start}{name}", "") for name in _choices(group)]
    if group.rpartition(".")[2] in PATHS:
        return _files(start, value.rpartition(",")[2])
    return [(f"{start}{word}", "") for word in _words_of(group)]


def _words_of(key: str) -> list[str]:
    """The values that a setting's comment lists as ``word: meaning``; true and false for a switch."""
    from kvsim.settings import catalog

    group = key.partition(".")[0]
    own = [
        setting for name in (_choices(group) if group in catalog.GROUPS else ()) for setting in catalog.settings_of(group, name)
    ]
    found = [setting for setting in (*catalog.run_settings(), *own) if setting.key == key]
    if any(setting.value in ("true", "false") for setting in found):
        return ["true", "false"]
    words = [word for setting in found for word in (setting.value or "", *catalog.named_values(setting.comment))]
    return [word for word in dict.fromkeys(words) if word not in ("", "null", "???")]


def _topics(current: str) -> Iterator[Candidate]:
    """What ``kvsim help`` describes."""
    from kvsim.settings import catalog

    if "=" in current:
        group = current.partition("=")[0]
        yield from ((f"{group}={name}", "") for name in _choices(group))
        return
    yield from catalog.GROUPS.items()
    for setting in catalog.all_settings():
        yield setting.key, catalog.first_sentence(setting.comment)


def _choices(group: str) -> list[str]:
    from kvsim.settings import catalog

    return list(catalog.choices(group)) if group in catalog.GROUPS else []


def _files(start: str, typed: str) -> Iterator[Candidate]:
    """Files and folders whose path begins with what was typed, those below the home folder as ``~``."""
    folder, _, name = typed.rpartition("/")
    shown = f"{folder}/" if "/" in typed else ""
    try:
        entries = sorted(os.scandir(os.path.expanduser(shown) or "."), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith(".")):
            yield f"{start}{shown}{entry.name}{'/' if entry.is_dir() else ''}", ""


def _starting(current: str, candidates: Iterable[Candidate]) -> list[Candidate]:
    return [(word, about) for word, about in candidates if word.startswith(current) and word != current]
