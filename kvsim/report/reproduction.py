"""Studies that repeat published results. Beside traces at hand they play published files, where an option gives their path."""

import hashlib
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from kvsim.report.study import Study, existing_trace
from kvsim.trace.published import TRACES

Cell = TypeVar("Cell")
Row = TypeVar("Row")


class PublishedFile(NamedTuple):
    """A file that was published with a paper."""

    name: str
    about: str
    size: str
    sha256: str | None = None
    """None if none was published."""

    def state(self, path: str | None) -> str:
        """Say whether the file was played and, of one with a published hash, whether it is the published file."""
        if path is None:
            return "not at hand"
        if self.sha256 is None:
            return "played"
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        return "played; it is the published one" if found == self.sha256 else f"played; another file: its sha256 is {found}"


def fetchable(name: str) -> PublishedFile:
    """Return a file that ``kvsim trace fetch NAME`` downloads."""
    trace = TRACES[name]
    return PublishedFile(trace.file, f"{trace.about}; `kvsim trace fetch {name}`", f"{trace.megabytes} MB", trace.sha256)


@dataclass(frozen=True, kw_only=True)
class Reproduction(Study[Cell, Row]):
    """A study whose cells name their ``trace``; those of a published file are played if its option is given."""

    published: dict[str, PublishedFile]
    """By the trace's name, which is the option, too."""

    def parser(self) -> ArgumentParser:
        parser = super().parser()
        for name, file in self.published.items():
            text = f"{file.name}, {file.about.partition(';')[0]} ({file.size}); not played if not given"
            parser.add_argument(f"--{name}", type=existing_trace, metavar="FILE", help=text)
        return parser

    def to_play(self, options: Namespace) -> list[Cell]:
        absent = {name for name in self.published if getattr(options, name) is None}
        return [cell for cell in super().to_play(options) if getattr(cell, "trace", None) not in absent]


def file_rows(files: dict[str, PublishedFile], options: Namespace) -> list[tuple[str, ...]]:
    """Return the lines of a table of published files: option, name, what it is, size, hash, whether it was played."""
    return [
        (
            f"--{name}",
            f"`{file.name}`",
            file.about,
            file.size,
            file.sha256 or "none published",
            file.state(getattr(options, name)),
        )
        for name, file in files.items()
    ]


FILE_HEAD = ("option", "file", "what it is", "size", "sha256", "here")
