"""The flags of the commands that take a configuration. Parsed without Hydra, so that a mistake is answered at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvsim.errors import UsageError
from kvsim.suggest import closest

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
CONFIGS = ("job", "hydra", "all")
FLAGS = {
    "--help": "Show the command's groups and settings; after it, any group, choice or setting to describe",
    "--multirun": "Run all combinations of KEY=A,B lists, or what an optimizing sweeper chooses",
    "--cfg": "Show the configuration without running: job, hydra (Hydra's own) or all",
    "--package": "With --cfg: show only this part of the configuration, such as tiers",
    "--resolve": "With --cfg: replace references such as ${page_tokens} by their values",
    "--config-dir": "Another folder with files of settings, for example --config-dir my_conf with my_conf/model/mine.yaml",
    "--config-name": "The file to start from instead of config.yaml, from --config-dir",
    "--info": f"Show how the configuration is put together: {', '.join(INFO)}",
    "--hydra-help": "Show the settings of Hydra, which composes configurations and runs sweeps",
    "--traceback": "Show the calls that led to an error before its line, for example those of a policy of your own",
}
"""What each flag does."""
SHORT = {
    "-h": "--help",
    "-m": "--multirun",
    "-c": "--cfg",
    "-p": "--package",
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-i": "--info",
}
SINGLE = ("validate", "calibrate", "shadow", "serve", "plan", "leaderboard", "train")
"""Commands that take a single configuration: no multirun."""
TAKES_VALUE = {"--cfg": CONFIGS, "--package": None, "--config-name": None, "--info": INFO}
"""Flags with a value, and what the value may be; None: anything."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A command line taken apart."""

    overrides: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    """The value of each flag given; empty for a flag without one."""
    topics: list[str] = field(default_factory=list)
    """The words after ``--help``: what it is to describe."""

    def __contains__(self, flag: str) -> bool:
        return flag in self.flags


def parse(words: Sequence[str]) -> Arguments:
    """Take a command line apart. Raises UsageError for an unknown flag, a wrong value, or flags that exclude each other."""
    arguments = Arguments()
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            arguments.overrides.append(word)
            continue
        flag, value = _read_flag(word, rest)
        arguments.flags[flag] = value
        if flag == "--help":
            arguments.topics.extend(word for word in rest if word not in ("-h", "--help"))
            return arguments
    _check_together(arguments)
    return arguments


def _read_flag(word: str, rest: Iterator[str]) -> tuple[str, str]:
    name, has_value, value = word.partition("=")
    flag = SHORT.get(name, name)
    if flag not in FLAGS:
        hint = closest(name, FLAGS) or f"; choose from {', '.join(FLAGS)}"
        raise UsageError(f"there is no flag {name}{hint} (settings have no dashes: KEY=VALUE)")
    if flag not in TAKES_VALUE:
        if has_value:
            raise UsageError(f"{flag} takes no value: leave out ={value}")
        return flag, ""
    value = value if has_value else next(rest, "")
    choices = TAKES_VALUE[flag]
    if flag == "--info" and not value:
        return flag, INFO[0]
    if not value:
        raise UsageError(f"{flag} needs a value: {', '.join(choices) if choices else FLAGS[flag]}")
    if choices and value not in choices:
        raise UsageError(
            f"{flag} {value}: there is no such choice{closest(value, choices) or ';'} choose from {', '.join(choices)}"
        )
    return flag, value


def _check_together(arguments: Arguments) -> None:
    for flag in ("--resolve", "--package"):
        if flag in arguments and "--cfg" not in arguments:
            raise UsageError(f"{flag} has no effect without --cfg: add --cfg job")
    given = [flag for flag in ("--multirun", "--cfg", "--info", "--hydra-help") if flag in arguments]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other: leave one out")
