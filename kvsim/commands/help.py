"""``kvsim help NAME`` and ``--help``: commands, groups, choices and settings, with the comments of their YAML files."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import chain

from kvsim.commands.layout import columns, wrapped
from kvsim.commands.listing import COMMANDS, usage
from kvsim.errors import UsageError
from kvsim.settings import catalog
from kvsim.settings.catalog import Setting, first_sentence
from kvsim.settings.flags import FLAGS, SHORT, SINGLE
from kvsim.settings.other_words import kvsims_words
from kvsim.settings.unused_settings import WITHOUT_EFFECT
from kvsim.suggest import closest

MORE = (
    "kvsim help NAME describes a group (eviction), a choice (eviction=slru), a setting (tiers.gpu.capacity), or what a file of "
    "results has (result.json, requests.csv.gz, ttft_s)."
)
MOST_BEGUN = 4
"""Settings that are suggested for the beginning of their names."""
WITH_HELP = (
    "simulate", "replay", "saturate", "plan", "curve", "leaderboard", "train", "validate", "calibrate", "serve", "shadow",
)  # fmt: skip
"""Commands that take a configuration."""


def main(arguments: Sequence[str]) -> None:
    """Describe what is named; without names, list the commands. Raises UsageError for a name that nothing has."""
    topics = [word for word in arguments if word not in ("-h", "--help")]
    if not topics:
        print(usage())
    elif len(topics) == 1 and topics[0] in COMMANDS and topics[0] != "help":
        import_module(f"kvsim.commands.{topics[0]}").main(["--help"])
    else:
        print("\n".join(describe(topics)))


def show_help(command: str, config_name: str, topics: Sequence[str]) -> None:
    """Print the help of a command that takes a configuration, or of the topics named after ``--help``. Raises UsageError."""
    print("\n".join(describe(topics) if topics else overview(command, config_name)))


def overview(command: str, config_name: str) -> Iterator[str]:
    """Yield the lines of a command's help: what it does, groups, settings with one line each, and flags."""
    multirun = " [-m]" if command not in SINGLE else ""
    yield f"usage: kvsim {command} [KEY=VALUE ...]{multirun} [--cfg job]"
    yield ""
    yield from wrapped(f"{COMMANDS[command][:1].upper()}{COMMANDS[command][1:]}.")
    yield ""
    idle = WITHOUT_EFFECT.get(command, ())
    yield "Groups: GROUP=CHOICE takes a file of settings. The default comes first."
    yield from columns((group, ", ".join(names)) for group, names in groups_of(config_name).items() if group not in idle)
    yield ""
    yield "Settings: KEY=VALUE. Those of a choice are GROUP.KEY=VALUE; see kvsim help GROUP=CHOICE."
    settings = [setting for setting in catalog.run_settings(config_name) if not _is_under(setting.key, idle)]
    yield from columns(
        ((f"{s.key}={s.value}", first_sentence(s.comment)) for s in settings if s.value is not None), is_short=True
    )
    yield ""
    yield "Flags:"
    yield from columns(flag_rows(command))
    yield ""
    yield from wrapped(MORE)


def groups_of(config_name: str) -> dict[str, list[str]]:
    """The choices of each group of a command's configuration, its default first."""
    default = catalog.defaults()
    found = {}
    for group in catalog.GROUPS if config_name == "config" else catalog.OF_CALIBRATE:
        names = list(catalog.choices(group))
        found[group] = sorted(names, key=lambda name, group=group: name != default.get(group))  # type: ignore[misc]
    return found


def flag_rows(command: str) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command with what they do."""
    letters = {flag: letter for letter, flag in SHORT.items()}
    for flag, purpose in FLAGS.items():
        if flag != "--multirun" or command not in SINGLE:
            yield ", ".join(name for name in (letters.get(flag), flag) if name), purpose


def _is_under(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def describe(topics: Sequence[str]) -> Iterator[str]:
    """Yield the lines about each topic. Raises UsageError for one that is unknown."""
    for number, topic in enumerate(topics):
        if number:
            yield ""
        yield from _describe(topic)


def _describe(topic: str) -> Iterator[str]:
    group, _, choice = topic.partition("=")
    if group in catalog.GROUPS:
        return _choice(group, choice) if choice else _group(group)
    if topic in FLAGS or topic in SHORT:
        flag = SHORT.get(topic, topic)
        return columns([(flag, FLAGS[flag])])
    if found := [group for group in catalog.GROUPS if topic in catalog.choices(group)]:
        return (line for number, group in enumerate(found) for line in (*[""] * bool(number), *_choice(group, topic)))
    key = topic.partition("=")[0]
    known = catalog.run_settings()
    if settings := _under(known, key):
        return chain(_settings(settings), _elsewhere(known, key))
    if settings := _of_choices(key):
        return _settings(settings)
    from kvsim.results.glossary import meanings  # only here: it loads NumPy

    if rows := meanings(topic):
        return columns(rows)
    if names := kvsims_words(topic):
        return chain(wrapped(f"{topic} is not a word of kvsim's; what it may mean: {', '.join(names)}."), [""], describe(names))
    raise UsageError(f"there is no group, choice or setting {topic!r}{_hint(key) or f'; {MORE}'}")


def _group(group: str) -> Iterator[str]:
    default = catalog.defaults().get(group, "null")
    yield from wrapped(f"{group}=NAME: {catalog.GROUPS[group]}. Default: {'none' if default == 'null' else default}.")
    tiers = [name for name in catalog.defaults() if name.startswith(f"{group}@")]
    if tiers:
        yield from wrapped(f"For one of several: {', '.join(f'{name}=NAME' for name in tiers)}.")
    yield ""
    rows = [(name, _summary(catalog.read_choice(path)[0])) for name, path in catalog.choices(group).items()]
    yield from columns(rows)
    yield ""
    yield from wrapped(f"Settings of a choice: kvsim help {group}={rows[0][0]}.")


def _summary(comment: str) -> str:
    """The first sentence about a choice, and the document that its numbers are from."""
    source = catalog.source_of(comment)
    return first_sentence(comment) + (f" ({source})" if source else "")


def _choice(group: str, name: str) -> Iterator[str]:
    known = catalog.choices(group)
    if name not in known:
        raise UsageError(f"{group}={name}: there is no such choice{closest(name, known) or ';'} choose from {', '.join(known)}")
    comment, settings = catalog.read_choice(known[name])
    yield f"{group}={name}"
    yield from wrapped(comment, indent=2)
    if group in catalog.OVER_OTHERS:
        yield ""
        yield from _of_others(settings)
    elif own := [setting for setting in catalog.settings_of(group, name) if setting.value is not None]:
        yield ""
        yield from _settings(own)


def _of_others(settings: Sequence[Setting]) -> Iterator[str]:
    """What a choice chooses from other groups, and which of their settings it sets."""
    comments = {setting.key: setting.comment for setting in settings}
    for entry in [entry for setting in settings if setting.key == "defaults" for entry in (setting.value or "").split(", ")]:
        yield "  " + entry.removeprefix("override /").replace(": ", "=", 1)
    rows = [setting for setting in settings if setting.key != "defaults" and setting.value is not None]
    for setting in rows:
        comment = setting.comment or comments.get(setting.key.rpartition(".")[0], "")
        yield f"  {setting.key}={setting.value}"
        yield from wrapped(comment, indent=6) if comment else ()


def _settings(settings: Sequence[Setting]) -> Iterator[str]:
    """Settings with their defaults and whole comments; a section gives its comment only."""
    for number, setting in enumerate(settings):
        if setting.value is None and not setting.comment:
            continue
        if number:
            yield ""
        value = "" if setting.value is None else "  (required)" if setting.value == "???" else f"={setting.value}"
        yield f"{setting.key}{value}"
        yield from wrapped(setting.comment, indent=4) if setting.comment else ()


def _under(settings: Sequence[Setting], key: str) -> list[Setting]:
    return [setting for setting in settings if _is_under(setting.key, (key,))]


def _elsewhere(settings: Sequence[Setting], key: str) -> Iterator[str]:
    """Where else a section has this name, such as the tier beside the settings of a disk."""
    if names := [setting.key for setting in settings if setting.key.endswith(f".{key}")]:
        yield ""
        yield from wrapped(f"See also: {', '.join(f'kvsim help {name}' for name in names)}.")


def _of_choices(key: str) -> list[Setting]:
    """The settings of this name of all choices of a group, those with the same comment once."""
    group = key.partition(".")[0]
    if group not in catalog.GROUPS:
        return []
    found: dict[str, Setting] = {}
    for name in catalog.choices(group):
        for setting in _under(catalog.settings_of(group, name), key):
            found.setdefault(setting.comment, setting)
    return list(found.values())


def _hint(key: str) -> str:
    keys = dict.fromkeys(
        setting.key for group in catalog.GROUPS for name in catalog.choices(group) for setting in catalog.settings_of(group, name)
    )
    keys |= dict.fromkeys(setting.key for setting in catalog.run_settings())
    names = [*COMMANDS, *catalog.GROUPS, *(name for group in catalog.GROUPS for name in catalog.choices(group))]
    if "." in key and (begun := [name for name in keys if name.startswith(key)]):
        return f"; did you mean {' or '.join(begun[:MOST_BEGUN])}?"
    ends = [name for name in keys if name.endswith(f".{key}")]
    return closest(key, ends) or closest(key, [*names, *keys])
