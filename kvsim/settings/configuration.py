"""Composes a configuration from overrides, and explains in one line which override is wrong."""

import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

import hydra
import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from kvsim.errors import UsageError, first_line
from kvsim.settings.catalog import GROUPS, OVER_OTHERS, unknown_choice
from kvsim.settings.search_path import extend_search_path
from kvsim.settings.settings_file import explain_file
from kvsim.settings.sources import use
from kvsim.settings.standard_input import saved_input
from kvsim.settings.unused_settings import given, keys_of
from kvsim.suggest import closest

CONFIG = "kvsim.conf"
EXTRAS = {
    ("hydra/launcher", "joblib"): "joblib",
    ("hydra/launcher", "submitit_local"): "submitit",
    ("hydra/launcher", "submitit_slurm"): "submitit",
    ("hydra/launcher", "ray"): "ray",
    ("hydra/launcher", "ray_aws"): "ray",
    ("hydra/sweeper", "optuna"): "optuna",
}
"""The extra of kvsim that installs each plugin of Hydra."""
FROM_INPUT = ("trace.path=-", "trace.path='-'")
LONGEST = 400
"""Characters of an override that an error message repeats."""
OF_SWEEPS = ("hydra.launcher", "hydra.sweeper")
OF_HYDRAS_JOBS = (
    "hydra.job.chdir", "hydra.job.env_set", "hydra.job.env_copy", "hydra.callbacks", "hydra.output_subdir", "hydra.verbose",
    "hydra.job_logging", "hydra/job_logging", "hydra.hydra_logging", "hydra/hydra_logging", "hydra.sweep.subdir",
)  # fmt: skip
"""What Hydra does around the jobs that it runs."""
ADVICE = re.compile(r", set env var HYDRA_FULL_ERROR=1 to see chained exception\.?")
TIER_POLICY = re.compile(r"tiers\.(\w+)\.(eviction|placement)(\..*)?")


class Composed(NamedTuple):
    """A configuration, and the choice that was made from each group."""

    config: DictConfig
    choices: dict[str, Any]


def compose(overrides: Sequence[str]) -> DictConfig:
    """Compose a run's configuration from overrides; ``output`` defaults to ``outputs``. Raises UsageError."""
    return compose_with_choices(overrides).config


def compose_with_choices(overrides: Sequence[str]) -> Composed:
    """Compose as ``compose`` does; ``choices`` are Hydra's own, by group. Raises UsageError."""
    check_overrides(overrides)
    overrides = with_trace_file(overrides)
    has_output = any(override.startswith("output=") for override in overrides)
    all_overrides = [*overrides, *(() if has_output else ("output=outputs",))]
    extend_search_path()
    with explained(overrides), only_known_errors(overrides), hydra.initialize_config_module(CONFIG, version_base="1.3"):
        config = hydra.compose("config", overrides=all_overrides, return_hydra_config=True)
    use(config.hydra.runtime.config_sources)
    return without_hydra(config)


def config_loader() -> ConfigLoader:
    """Return Hydra's loader of kvsim's files of settings and the user's own. Raises UsageError."""
    extend_search_path()
    with explained(()), only_known_errors(()), hydra.initialize_config_module(CONFIG, version_base="1.3"):
        return GlobalHydra.instance().config_loader()


class Asked(NamedTuple):
    """What a command line asks for."""

    config: DictConfig
    """The configuration with Hydra's own part; of a sweep, the one that its jobs share."""
    config_name: str
    """The file that the configuration starts from."""
    loader: ConfigLoader
    is_sweep: bool

    @property
    def overrides(self) -> list[str]:
        """The user's overrides as they were written, references in them included."""
        written = OmegaConf.to_container(self.config.hydra.overrides.task, resolve=False)
        return [str(override) for override in cast(list[Any], written)]


def check_run_here(asked: Asked) -> None:
    """Raise UsageError for settings of Hydra that have no effect on jobs which kvsim runs itself."""
    keys = keys_of(map(str, asked.config.hydra.overrides.hydra))
    if key := next(filter(None, (given(keys, name) for name in OF_HYDRAS_JOBS)), None):
        raise UsageError(f"{key} has no effect: kvsim runs this itself, not Hydra; leave it out")


@contextmanager
def explained(overrides: Sequence[str], config_name: str = "config") -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf about these overrides into UsageError, one line that names the override at fault."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(found := _first_cause(error), UsageError):  # raised while Hydra imported something
            raise found from None
        raise UsageError(explain(error, list(overrides), config_name)) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(explain_file(error)) from error


def _first_cause(error: BaseException) -> BaseException:
    """Return the error at the beginning of a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def only_known_errors(overrides: Sequence[str]) -> Iterator[None]:
    """Turn Hydra's warnings, and exceptions that are not its own, into UsageError.

    Hydra does not check its settings, or what files set, before it uses them.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", category=UserWarning, module=r"hydra\.")
            yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, UsageError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            if error.filename is None:
                raise
            raise UsageError(f"{error.filename}: {error.strerror}") from error
        hydras = [override for override in overrides if override.lstrip("+~").startswith("hydra")] or overrides
        problem = str(error) if isinstance(error, UserWarning | RuntimeError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"Hydra cannot use {brief(' '.join(hydras)) or 'the configuration'}: {problem}") from error


def check_overrides(overrides: Sequence[str], *, is_multirun: bool = False) -> None:
    """Raise UsageError for overrides that Hydra accepts although they cannot mean anything here."""
    groups = {folder.name for folder in files(CONFIG).iterdir() if folder.is_dir()}
    for override in map(parse, overrides):
        name, value = override.get_key_element().lstrip("+~"), override.value()
        is_group = override.key_or_group in groups
        if is_group and override.is_delete() and override.package is None and name not in OVER_OTHERS:
            raise UsageError(f"~{name}: every run needs one; choose another with {name}=NAME")
        values = value.list if isinstance(value, ChoiceSweep) else [value]
        if is_group and not override.is_delete() and any(choice in (None, [], {}) for choice in values):
            raise UsageError(f"{brief(override.input_line)}: choose one by name, {name}=NAME, or leave it out")
        if is_group and isinstance(value, list):
            several = ",".join(map(str, value))
            raise UsageError(f"{override.input_line}: choose one; to compare several, run kvsim with -m and {name}={several}")
        if name in ("hydra.run", "hydra.run.dir"):
            raise UsageError(f"{brief(override.input_line)}: choose the run's folder with output=DIR")
        if name in OF_SWEEPS and value is None:
            group = name.replace(".", "/")
            raise UsageError(f"{override.input_line}: choose one by name, {group}=NAME, or leave it out")
        if is_multirun and override.is_sweep_override() and (name == "output" or name.startswith("sweep.")):
            raise UsageError(f"{override.input_line}: {name} is one for all jobs of a sweep; set a single value")


def parse(line: str) -> Override:
    """Parse one override. Raises UsageError for one that cannot be parsed."""
    try:
        override: Override = OverridesParser.create().parse_override(line)
    except (HydraException, ValueError, RecursionError) as error:
        raise UsageError(_not_parsed(line)) from error
    if not override.get_key_element().lstrip("+~"):
        raise UsageError(_not_parsed(line))
    return override


def _not_parsed(line: str) -> str:
    return f"cannot parse the override {brief(repr(line))}: use KEY=VALUE, and quote a value that contains spaces or brackets"


def brief(text: str | None) -> str:
    """Return a text without its middle if it is very long."""
    text = text or ""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{text[-LONGEST // 4 :]}"


def without_hydra(config: DictConfig) -> Composed:
    """Split a configuration that has Hydra's own part, which is removed from it, into what a run needs."""
    choices = dict(config.hydra.runtime.choices)
    with read_write(config), open_dict(config):
        del config["hydra"]
    return Composed(config, choices)


def quoted(value: Any) -> str:
    """Format a value so that Hydra's override grammar reads it back unchanged."""
    if isinstance(value, str | Path):
        escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return "null" if value is None else str(value)


def with_trace_file(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with what they leave open about the trace's file.

    ``trace.path=-`` becomes the path of a copy of standard input. ``trace=auto`` is added if the overrides name a file, but
    neither they nor a preset choose its format. Raises TraceError if standard input is a terminal.
    """
    overrides = [f"trace.path={quoted(saved_input())}" if word in FROM_INPUT else word for word in overrides]
    keys = [override.lstrip("+~").split("=", 1)[0] for override in overrides]
    if "trace.path" not in keys or "trace" in keys or any(map(_preset_has_trace, overrides)):
        return overrides
    return ["trace=auto", *overrides]


def _preset_has_trace(override: str) -> bool:
    """Whether the override chooses a preset of kvsim's that also chooses the trace."""
    group, _, names = override.lstrip("+").partition("=")
    if group != "preset":
        return False
    paths = [files(CONFIG) / "preset" / f"{name.strip()}.yaml" for name in names.split(",")]
    return any("override /trace:" in path.read_text() for path in paths if path.is_file())


def explain(error: Exception, overrides: Sequence[str], config_name: str = "config") -> str:
    """Return one line that names the wrong override and suggests a correct one."""
    message = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return _not_parsed(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _unknown_choice(error)
    if isinstance(error, ConfigCompositionException):
        if ambiguous := re.match(r"Ambiguous value for argument '(.*?)' 1\.", message):
            return f"{ambiguous[1]} lists several values: add -m to run them one after another"
        if sweep := re.match(r"Sweep parameters '(.*)' requires", message):
            return f"{sweep[1]} lists several values: add -m to run them one after another"
        if known := re.match(r"Could not append to config\. An item is already at '(.*?)'", message):
            return f"+{known[1]}: there is such a setting already; leave out the +"
        if unknown := re.match(r"Could not (?:override|delete from config\.) '(.*?)'", message):
            return _unknown_key(unknown[1], error, overrides, config_name)
        if unknown := re.match(r"Override \S+ looks like a config group override, but config group '(.*?)'", message):
            return _unknown_key(unknown[1], error, overrides, config_name)
        if isinstance(error.__cause__, OmegaConfBaseException):
            return explain(error.__cause__, overrides, config_name)
    if isinstance(error, OmegaConfBaseException):
        line = first_line(error)
        if re.fullmatch("Cannot merge (Dict|List)Config with (Dict|List)Config", line):
            line = _misshapen(error.full_key or "", overrides)
        return ": ".join(part for part in (error.full_key, line) if part)
    return ADVICE.sub("", message)


def _misshapen(key: str, overrides: Sequence[str]) -> str:
    """Say that a list was given for a mapping, or the other way round."""
    values = [override.partition("=")[2] for override in overrides if override.partition("=")[0].lstrip("+") == key]
    if values and values[-1].startswith("["):
        return "a mapping is expected, {name: value, ...}, not a list"
    return "a list is expected, [...], not a mapping" if values else "a list is expected, or a mapping: the other one is given"


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    if (group, choice) in EXTRAS:
        return f"{group}={choice} is not installed: pip install 'kvsim[{EXTRAS[group, choice]}]'"
    options = sorted(error.options or ())
    if not options:
        return f"there is no file {choice}.yaml in the folders of settings"
    return unknown_choice(group, choice, options)


def _unknown_key(key: str, error: Exception, overrides: Sequence[str], config_name: str) -> str:
    if policy := TIER_POLICY.fullmatch(key):
        tier, family, setting = policy.groups()
        if setting is None:
            return f"{key}: use {family}@tiers.{tier}.{family}=NAME to give the tier its own policy"
        if not any(override.startswith(f"{family}@tiers.{tier}.") for override in overrides):
            return f"{key}: the tier has no policy of its own; add {family}@tiers.{tier}.{family}=NAME"
    is_hydras = key.startswith("hydra")
    keys = [name for name in _known_keys(error, overrides, config_name) if name.startswith("hydra") == is_hydras]
    inner = getattr(error.__cause__, "full_key", None)
    key = inner if key in keys and inner else key  # a mapping with an unknown name
    group = key.partition(".")[0]
    if group != key and group not in keys and group in GROUPS:
        return f"{key}: no {group} is chosen that has settings: add {group}=NAME"
    if hint := _similar_key(key, keys):
        return f"{key}: there is no such setting{hint}"
    parent = key.rpartition(".")[0]
    while parent and parent not in keys:
        parent = parent.rpartition(".")[0]
    siblings = [
        own
        for start, _, own in (name.rpartition(".") for name in keys)
        if start == parent and own != "_target_" and "@" not in own
    ]
    known = ", ".join(dict.fromkeys(siblings))
    return f"{key}: there is no such setting; {parent or 'the configuration'} has {known or 'none'}"


def _similar_key(key: str, keys: Sequence[str]) -> str:
    """Suggest a key: one that ends with what was given, else a similar one of the same depth, else of any."""
    ends = [name for name in keys if name.endswith(f".{key}")]
    return (
        closest(key, [name for name in keys if name.count(".") == key.count(".") and name != key])
        or closest(key, ends)
        or closest(key, [name for name in keys if name != key])
    )


def _known_keys(error: Exception, overrides: Sequence[str], config_name: str) -> list[str]:
    """All configuration keys and groups: of the configuration that was composed before the error, else of one composed anew."""
    config = composed_before(error)
    if config is None:
        groups = {folder.name for folder in files(CONFIG).iterdir() if folder.is_dir()}
        choices = [override for override in overrides if override.split("=")[0].split("@")[0] in groups]
        config = _compose_any(config_name, (choices, []))
    if config is None:
        return []
    groups_of_tiers = [str(name) for name in config.hydra.runtime.choices if not str(name).startswith("hydra/")]
    plain = cast(dict[str, Any], OmegaConf.to_container(config))
    return [*groups_of_tiers, *_paths(plain)]


def composed_before(error: Exception) -> DictConfig | None:
    """Return the configuration to which Hydra was applying an override when it failed; None if it failed earlier."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "_apply_overrides_to_config":
            return cast(DictConfig, frame.f_locals["cfg"])
    return None


def _compose_any(config_name: str, attempts: Sequence[Sequence[str]]) -> DictConfig | None:
    """The configuration of the first overrides that compose."""
    with hydra.initialize_config_module(CONFIG, version_base="1.3"):
        for overrides in attempts:
            try:
                return hydra.compose(config_name, overrides=list(overrides), return_hydra_config=True)
            except (HydraException, OmegaConfBaseException):
                continue
    return None


def _paths(node: dict[str, Any], prefix: str = "") -> list[str]:
    paths = []
    for name, value in node.items():
        paths.append(f"{prefix}{name}")
        if isinstance(value, dict):
            paths += _paths(value, f"{prefix}{name}.")
    return paths
