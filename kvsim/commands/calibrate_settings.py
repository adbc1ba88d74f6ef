"""The settings of ``kvsim calibrate``, and what is checked before anything is measured."""

import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import kvsim.conf
from kvsim.errors import UsageError
from kvsim.numbers import SECONDS, Whole, check_settings
from kvsim.plans.build import check_output

OF_MACHINE = ("disk", "page_tokens")
OF_MEASURING = ("seed", "served_model", "step_tokens", "longest_tokens", "seconds")
OF_SERVER = ("hardware", "served_model", "step_tokens", "longest_tokens", "seconds", "pads_chunks")
"""Settings that have an effect only where this machine is measured, where anything is measured, or where a server is."""


@dataclass(frozen=True, kw_only=True)
class CalibrateSettings:
    """The settings of ``conf/calibrate.yaml`` other than the model."""

    name: str
    overwrite: bool
    output: str | None
    disk: str
    page_tokens: int
    seed: int
    server: str | None
    served_model: str | None
    measured: str | None
    step_tokens: int | None
    longest_tokens: int | None
    seconds: float
    pads_chunks: bool

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ValueError(
                f"name must start with a lower-case letter, then lower-case letters, digits and underscores, not {self.name!r}"
            )
        check_settings(self, Whole(1), "page_tokens")
        check_settings(self, Whole(), "seed")
        check_settings(self, Whole(1), "step_tokens", "longest_tokens", or_null=True)
        check_settings(self, SECONDS, "seconds")
        if self.server is not None and self.measured is not None:
            raise ValueError("server and measured exclude each other: leave one out")

    @property
    def is_of_server(self) -> bool:
        """Whether a server is measured, now or before, not this machine."""
        return self.server is not None or self.measured is not None

    @property
    def file(self) -> Path:
        """Path of the file to write."""
        folder = Path(self.output) if self.output else Path(str(files(kvsim.conf))) / "hardware"
        return folder / f"{self.name}.yaml"


def check_effect(settings: CalibrateSettings, chosen: list[str]) -> None:
    """Raise UsageError for settings that have no effect on what is measured."""
    without: tuple[str, ...]
    if settings.measured is not None:
        without, why = (*OF_MACHINE, *OF_MEASURING), "where measurements are fitted again"
    elif settings.server is not None:
        without, why = OF_MACHINE, "where a server is measured"
    else:
        without, why = OF_SERVER, "without server= or measured="
    for override in chosen:
        if (name := re.split(r"[.=]", override.lstrip("+~"))[0]) in without:
            raise UsageError(f"{name} has no effect {why}: leave it out")


def check_file(settings: CalibrateSettings) -> None:
    """Raise UsageError if the file must not be overwritten or cannot be written, or if the disk's folder does not exist."""
    if settings.file.exists() and not settings.overwrite:
        raise UsageError(f"{settings.file} already exists: choose another name=NAME, or set overwrite=true")
    if not settings.file.parent.is_dir():
        raise UsageError(f"output: there is no folder {settings.file.parent}")
    check_output(settings.file.parent)
    if not settings.is_of_server and not Path(settings.disk).is_dir():
        raise UsageError(f"disk: there is no folder {settings.disk}")
