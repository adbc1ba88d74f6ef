"""The file of ``kvsim plan``: what hardware costs, and what to choose from. kvsim knows no price of its own."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvsim.errors import UsageError
from kvsim.hardware.tier_kinds import LEVELS
from kvsim.numbers import Real, Whole, check_number
from kvsim.plans.arguments import override
from kvsim.plans.capacity import bytes_of
from kvsim.plans.construct import construct
from kvsim.settings import catalog
from kvsim.settings.settings_file import read_file
from kvsim.settings.unused_settings import keys_of
from kvsim.suggest import closest

NO_DRIVE = "none"
OF_DRIVES = ("hardware.disk_", "hardware.cluster_disk_", "tiers.disk.")
"""How the settings begin that a drive may have."""
DEGREES = {"hardware.pipeline_parallel": "pipeline_parallel", "hardware.expert_parallel": "expert_parallel"}
"""Settings that say how an engine's GPUs share a model, and the choices for them."""
CHOICES = {
    "hardware": "gpus",
    "hardware.gpus": "choices.gpus_per_engine",
    "hardware.tensor_parallel": "choices.gpus_per_engine and choices.pipeline_parallel",
    **{key: f"choices.{name}" for key, name in DEGREES.items()},
    "cluster.engines": "choices.engines",
    "tiers.cpu.capacity": "choices.cpu",
    "tiers.disk.capacity": "choices.drives",
}
"""Where the file of prices chooses what a setting says."""
OWN = (*CHOICES, *[key for name in LEVELS[1:] if (key := f"tiers.{name}.capacity") not in CHOICES])
"""Settings that cost money, or say how what does is used: only the file of prices may choose them. It has no price for the tiers
below the disk."""
HARDWARE = ("hardware", "drive", "network")
"""What a policy cannot change: all policies are tried on the same hardware."""
NO_POLICIES = ("trace", "slo", "saturate", "plan", "output", "sweep", "hydra")
"""What a policy cannot set: what is asked, and of which requests."""
PERIODS = ("hour", "month")
PRICE = Real(least=0)


@dataclass(kw_only=True)
class Choices:
    """What the configurations are all combinations of, besides the GPUs that have a price."""

    engines: list[int] = field(default_factory=lambda: [1])
    gpus_per_engine: list[int] = field(default_factory=lambda: [1])
    pipeline_parallel: list[int] = field(default_factory=lambda: [1])
    """Stages of each engine; its GPUs are shared out evenly."""
    expert_parallel: list[int] = field(default_factory=lambda: [1])
    """Groups of the GPUs that share a layer, each with experts of its own."""
    cpu: list[Any] = field(default_factory=lambda: ["0"])
    """CPU memory for KV of each host, such as ``256GiB``, each copy of the KV counted once."""
    drives: list[str] = field(default_factory=lambda: [NO_DRIVE])
    """The drive of each host."""
    policies: list[str] = field(default_factory=lambda: [""])
    """Overrides, such as ``eviction=slru placement=write_back``; a bare name is an eviction policy."""

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            values = getattr(self, name)
            if not values or len(set(map(str, values))) < len(values):
                raise ValueError(f"{name} {'has a value twice' if values else 'is empty'}: give at least one value, each once")
        for name in ("engines", "gpus_per_engine", *DEGREES.values()):
            for value in getattr(self, name):
                check_number(name, Whole(1), value)
        for size in self.cpu:
            bytes_of(size, "cpu")


@dataclass(kw_only=True)
class PriceList:
    """Prices per hour or per month, in any currency, and the choices."""

    gpus: dict[str, float]
    """Price of a GPU with its share of the server, by the name of its file in ``conf/hardware``."""
    per: str
    currency: str = ""
    gpus_per_host: int | None = None
    """The most GPUs of a host; None: all are on one."""
    cpu_gib: float | None = None
    """Price of a GiB of CPU memory."""
    drives: dict[str, Any] = field(default_factory=dict)
    choices: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gpus:
            raise ValueError("gpus is empty: give the price of at least one, such as h100: 2.5")
        if self.per not in PERIODS:
            raise ValueError(f"per must be one of {', '.join(PERIODS)}, not {self.per}")
        for name, price in self.gpus.items():
            check_number(f"gpus.{name}", PRICE, price)
        check_number("gpus_per_host", Whole(1), self.gpus_per_host, or_null=True)
        check_number("cpu_gib", PRICE, self.cpu_gib, or_null=True)

    @property
    def unit(self) -> str:
        """What prices are in, such as ``USD per hour``."""
        return f"{self.currency} per {self.per}".strip()


@dataclass(frozen=True, kw_only=True)
class Drive:
    """A drive of a host: what it costs, and what it changes in the configuration."""

    price: float
    lines: tuple[str, ...]
    """Overrides: the capacity of the disk tier, and the drive's rates."""
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The content of a file of prices, checked."""

    listed: PriceList
    choices: Choices
    drives: dict[str, Drive]

    def engines_per_host(self, engines: int, gpus: int) -> int | None:
        """Return how many of so many engines are on a host: as many as can be if all hosts have the same; None: all of them."""
        if self.listed.gpus_per_host is None or engines * gpus <= self.listed.gpus_per_host:
            return None
        most = self.listed.gpus_per_host // gpus
        return max(on_each for on_each in range(1, most + 1) if engines % on_each == 0)

    def price(self, gpu: str, gpus: int, cpu_bytes: int, drive: str, drives: int) -> float:
        """Return the price of all GPUs, of all CPU memory for KV, and of all drives."""
        memory = cpu_bytes / 2**30 * (self.listed.cpu_gib or 0.0)
        return float(f"{self.listed.gpus[gpu] * gpus + memory + self.drives[drive].price * drives:.10g}")


def read_prices(prices: str | Path | Mapping[str, Any]) -> Prices:
    """Read a file of prices, or what is its content. Raises UsageError, with a line that names the file and the key."""
    node = dict(prices) if isinstance(prices, Mapping) else read_file(Path(prices))
    try:
        return _checked(node)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{'prices' if isinstance(prices, Mapping) else prices}: {error}") from error


def _checked(node: dict[str, Any]) -> Prices:
    for name in ("gpus", "per"):
        if name not in node:
            raise UsageError(f"{name} is missing: {'gpus: {h100: 2.5}' if name == 'gpus' else 'per: hour, or per: month'}")
    for name in ("gpus", "drives", "choices"):
        if name in node and not isinstance(node[name], dict):
            raise UsageError(f"{name} must be a mapping, not {node[name]!r}")
    listed = construct(PriceList, node | {"gpus": {str(name): price for name, price in node["gpus"].items()}}, "")
    lists = {name: value if isinstance(value, list) else [value] for name, value in listed.choices.items()}
    choices = construct(Choices, lists, "choices")
    if listed.gpus_per_host is not None and max(choices.gpus_per_engine) > listed.gpus_per_host:
        raise UsageError(f"choices.gpus_per_engine: the GPUs of an engine are on one host, which has {listed.gpus_per_host}")
    _check_names("gpus", listed.gpus, catalog.choices("hardware"), "file of hardware")
    drives = {str(name): _drive(str(name), drive) for name, drive in listed.drives.items()}
    drives[NO_DRIVE] = Drive(price=0.0, lines=("tiers.disk.capacity=0",), n_bytes=0)
    _check_names("choices.drives", choices.drives, drives, "drive")
    if listed.cpu_gib is None and any(bytes_of(size) for size in choices.cpu):
        raise UsageError("cpu_gib is missing: give the price of a GiB of CPU memory, which choices.cpu has")
    for at, policy in enumerate(choices.policies):
        _check_policy(policy, f"choices.policies[{at}]")
    return Prices(listed=listed, choices=choices, drives=drives)


def _drive(name: str, node: Any) -> Drive:
    key = f"drives.{name}"
    if name == NO_DRIVE:
        raise UsageError(f"{key}: this name stands for no drive: choose another one")
    if not isinstance(node, dict) or not {"price", "capacity"} <= set(node):
        raise UsageError(f"{key} must have a price and a capacity, such as {{price: 0.1, capacity: 2TiB}}, not {node!r}")
    for setting, value in node.items():
        if isinstance(value, dict | list):
            raise UsageError(f"{key}.{setting} must be a single value, not {value!r}")
    check_number(f"{key}.price", PRICE, node["price"])
    n_bytes = bytes_of(node["capacity"], f"{key}.capacity")
    if not n_bytes:
        raise UsageError(f"{key}.capacity must be above 0; the drive {NO_DRIVE} is none")
    own = {str(name): value for name, value in node.items() if name not in ("price", "capacity")}
    for setting in own:
        if not setting.startswith(OF_DRIVES) or setting == "tiers.disk.capacity":
            begins = " or ".join(f"{start}..." for start in OF_DRIVES)
            raise UsageError(f"{key}.{setting}: a drive has price, capacity, and settings {begins}")
    has_rates = any(setting.startswith("hardware.") for setting in own)
    listed = (f"drive={name}",) if name in catalog.choices("drive") and not has_rates else ()
    lines = (*listed, f"tiers.disk.capacity={node['capacity']}", *(override(setting, value) for setting, value in own.items()))
    return Drive(price=float(node["price"]), lines=lines, n_bytes=n_bytes)


def overrides(policy: str, key: str = "") -> list[str]:
    """Return an entry of ``choices.policies`` as overrides. Raises UsageError."""
    try:
        words = shlex.split(str(policy))
    except ValueError as error:
        raise UsageError(f"{key}: cannot read {policy!r}: {error}") from error
    return [word if "=" in word else f"eviction={word}" for word in words]


def _check_policy(policy: str, place: str) -> None:
    """Raise UsageError for overrides that cost money, or that change what is asked."""
    for key in keys_of(overrides(policy, place)):
        group = key.partition(".")[0]
        if key not in OWN and group in HARDWARE:
            raise UsageError(f"{place}: {key} is no policy: it changes the hardware, whose price it would not change")
        if key in DEGREES:
            raise UsageError(f"{place}: {key} is no policy: set choices.{DEGREES[key]}")
        if key in OWN or group in NO_POLICIES:
            raise UsageError(f"{place}: {key} is no policy: {'it costs money' if key in OWN else 'set it on the command line'}")


def _check_names(key: str, names: Iterable[str], known: Mapping[str, Any], what: str) -> None:
    for name in names:
        if name not in known:
            hint = closest(name, known) or f"; choose from {', '.join(known)}"
            raise UsageError(f"{key}: there is no {what} {name}{hint}")
