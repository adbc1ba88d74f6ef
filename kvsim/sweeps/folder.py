"""The folder of a sweep, by jobs: which have finished, where a new one goes, and what is written of one that fails."""

import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kvsim.errors import PolicyFailed, UsageError
from kvsim.files.writing import FileSet, replacing
from kvsim.report.folder import prepare_folder, write_shared_script
from kvsim.report.refreshing import Refreshing
from kvsim.report.template import SHARED_SCRIPT
from kvsim.results.records import Damaged, read_result, read_sweep
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run
from kvsim.run.execute import failure_message

HASH = re.compile(rb'"config_hash": "([0-9a-f]{32})"')
HEAD_BYTES = 400
"""The hash of a finished job is within this many leading bytes of its result."""


def place_job(folder: Path, number: str, config_hash: str) -> tuple[str, RunRecord | None]:
    """The name of a job's folder inside the sweep's folder, and the job's result if it has finished.

    A job has finished if any folder of the sweep has the result of its configuration. If the folder with its number has the
    result of another configuration, left by an earlier sweep, part of the hash is added to the name.
    """
    index = index_of(folder.absolute())
    if name := index.get(config_hash):
        if (result := finished(folder / name, config_hash)) is not None and name != number:
            with suppress(OSError):
                (folder / number).rmdir()
        return name, result
    is_taken = number in index.values() and (folder / number / "result.json").exists()
    return f"{number}-{config_hash[:8]}" if is_taken else number, None


def finished(folder: Path, config_hash: str) -> RunRecord | None:
    """Return the result in a run's folder if it is that of a configuration; a damaged one is reported and counts as none."""
    if not os.path.lexists(folder / "result.json"):
        return None
    try:
        result = read_result(folder)
    except Damaged as error:
        print(f"kvsim: {error}: running it again", file=sys.stderr, flush=True)
        return None
    return result if result.get("config_hash") == config_hash else None


def begin_folder(folder: Path, record: dict[str, Any]) -> None:
    """Make a sweep's folder, which the caller has locked, ready for its jobs.

    ``record`` becomes ``sweep.json``; errors of an earlier run of the sweep go. Raises UsageError if it cannot be written.
    """
    try:
        write_shared_script(folder)
        index_of.cache_clear()
        for left in folder.glob("*/error.json"):
            left.unlink()
    except OSError as error:
        raise UsageError(f"output: cannot remove {error.filename} of an earlier sweep: {error.strerror}") from error
    with replacing(folder / "sweep.json") as file:
        file.write(json.dumps(record, indent=2).encode())


@cache
def index_of(folder: Path) -> dict[str, str]:
    """Names of the finished jobs in a sweep's folder by the hash of their configuration. Read once per process."""
    index = {}
    for path in sorted(folder.glob("*/result.json")):
        with suppress(OSError), path.open("rb") as file:
            if found := HASH.search(file.read(HEAD_BYTES)):
                index[found[1].decode()] = path.parent.name
    return index


def outcome_line(result: RunRecord) -> str:
    """Summarize a run in a few words."""
    rate = "no prompt served" if result["hit_rate"] is None else f"hit rate {result['hit_rate']:.2%}"
    p99 = result["ttft_s"]["p99"]
    waiting = "" if p99 is None else f", ttft p99 {p99:.3g} s"
    return f"{rate}{waiting}, {result['wall_s']:.3g} s"


def failure_record(error: Exception, overrides: list[str]) -> dict[str, Any]:
    """Return the content of ``error.json``. Anything but a UsageError is a crash.

    The traceback of a crash is in it, and that of an error in a policy of the user's own.
    """
    is_crash = not isinstance(error, UsageError)
    record: dict[str, Any] = {"error": failure_message(error), "is_crash": is_crash, "overrides": overrides}
    if is_crash or isinstance(error, PolicyFailed):
        record["traceback"] = "".join(traceback.format_exception(error)).splitlines()
    return record


def write_failure(folder: Path, record: dict[str, Any]) -> str:
    """Write the ``error.json`` of a job into its folder, if that can be written. Returns the folder's name.

    If the folder has the result of another configuration, left by an earlier sweep, a folder beside it gets the file.
    """
    if os.path.lexists(folder / "result.json"):
        folder = folder.with_name(f"{folder.name}-failed")
    with suppress(UsageError):
        prepare_folder(folder)
        with replacing(folder / "error.json") as file:
            file.write(json.dumps(record, indent=2).encode())
    return folder.name


def write_comparison(folder: Path, runs: list[Run]) -> list[str]:
    """Write the files about all runs in a sweep's folder and return their names.

    These are ``sweep.csv``; unless all failed, ``report.html``; with several seeds ``means.csv``, with objectives ``pareto.csv``.
    """
    from kvsim.report.comparison.csv_text import comparison_csv, means_csv
    from kvsim.report.comparison.pareto import front_of

    texts = {"sweep.csv": comparison_csv(runs)}
    if any(run.result is not None for run in runs):
        front = front_of(runs)
        texts["means.csv"] = means_csv(runs) or ""
        texts["pareto.csv"] = front.csv() if front else ""
        texts["report.html"] = sweep_page(folder, runs)
    with FileSet(folder) as files:
        for name, text in texts.items():
            if text:
                files.write(name, text)
            else:
                files.remove(name)  # of another sweep before this one
    return [name for name, text in texts.items() if text]


def sweep_page(folder: Path, runs: Sequence[Run], refreshing: Refreshing | None = None) -> str:
    """Return the page of a sweep's folder about its runs; ``refreshing`` says how far the sweep is while it runs."""
    from kvsim.report.comparison.html import render_comparison

    sweep = read_sweep(folder)
    return render_comparison(
        runs,
        sweep["command_line"],
        folder=folder,
        shared_script=SHARED_SCRIPT,
        notes=sweep.get("notes", ()),
        refreshing=refreshing,
    )
