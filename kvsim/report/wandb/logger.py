"""Logs runs and sweeps to Weights & Biases, offline by default."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvsim.errors import UsageError
from kvsim.report.comparison.compare import Comparison
from kvsim.report.comparison.csv_text import comparison_csv
from kvsim.report.template import SHARED_SCRIPT
from kvsim.report.wandb.content import (
    axis,
    configuration,
    request_rows,
    run_name,
    series,
    summary,
    swept_keys,
)
from kvsim.results.frame import columns_of
from kvsim.results.logger import Logger
from kvsim.results.records import read_requests
from kvsim.results.result import RunRecord
from kvsim.results.runs import Run

MODES = ("offline", "online", "disabled")
Send = Callable[[Any, Any], None]
"""Logs to an open run; the arguments are the package wandb and the run."""


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """Logs each run, and a sweep as a whole. If W&B fails, one line says so; the run's folder is complete anyway.

    A setting that is None is taken from W&B's own environment variable, such as WANDB_PROJECT, if that is set.
    """

    project: str | None = None
    entity: str | None = None
    mode: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    request_rows: int = 2000
    page: bool = False

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode}")
        if self.project == "":
            raise ValueError("project must not be empty")
        if self.request_rows < 0:
            raise ValueError(f"request_rows must be 0 or more, not {self.request_rows}")
        if find_spec("wandb") is None:
            raise ValueError("Weights & Biases is not installed: pip install kvsim[wandb], or leave out logger=wandb")

    @property
    def wants_page(self) -> bool:
        return self.page

    def log(self, folder: Path, result: RunRecord, group: str | None) -> None:
        def send(wandb: Any, run: Any) -> None:
            self._log_result(wandb, run, folder, result)

        self._send(folder, result, group, send)

    def log_failure(self, folder: Path, begun: RunRecord, error: str, group: str | None) -> None:
        def send(wandb: Any, run: Any) -> None:
            run.summary.update({"status": "failed", "error": error})

        self._send(folder, begun, group, send, exit_code=1)

    def log_watched(
        self, folder: Path, begun: RunRecord, points: Sequence[Mapping[str, float]], last: Mapping[str, float]
    ) -> None:
        def send(wandb: Any, run: Any) -> None:
            run.define_metric("shadow/*", step_metric="shadow/at_s", summary="none")
            run.summary.update(dict(last))
            for point in points:
                run.log(dict(point))

        self._open(folder, begun["command"], begun["command"], configuration(begun), None, send)

    def log_sweep(self, folder: Path, runs: Sequence[Run]) -> None:
        if not any(run.result is not None for run in runs):
            return

        def send(wandb: Any, run: Any) -> None:
            _log_comparison(wandb, run, folder, runs)

        described = {"jobs": len(runs), "swept": swept_keys(folder)}
        self._open(folder, f"{folder.name}: comparison", "comparison", described, folder.name, send)

    def _send(self, folder: Path, record: RunRecord, group: str | None, send: Send, exit_code: int = 0) -> None:
        """Log a run: a single one into its own folder, a job into that of its sweep."""
        place = folder if group is None else folder.parent
        name = run_name(record, swept_keys(place) if group is not None else [])
        self._open(place, name, record["command"], configuration(record), group, send, exit_code)

    def _open(
        self, place: Path, name: str, kind: str, config: dict[str, Any], group: str | None, send: Send, exit_code: int = 0
    ) -> None:
        """Open a run of W&B whose files lie in ``place``, and log to it."""
        try:
            with _inside(place):
                import wandb

                run = wandb.init(
                    **self._chosen(name, group),
                    job_type=kind,
                    config=config,
                    dir=os.environ.get("WANDB_DIR") or str(place.resolve()),
                    settings=wandb.Settings(silent=True, disable_git=True, save_code=False, console="off", x_disable_stats=True),
                )
                try:
                    send(wandb, run)
                except BaseException:
                    run.finish(exit_code=1)
                    raise
                run.finish(exit_code=exit_code)
        except Exception as error:  # a problem with W&B must not fail a finished run
            message = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"kvsim: warning: not logged to Weights & Biases: {message}; {place} is complete", file=sys.stderr)

    def _chosen(self, name: str, group: str | None) -> dict[str, Any]:
        """Return what a run is called and where it goes: explicit settings, then W&B's variables, then kvsim's defaults."""
        env = os.environ
        of_agent = "WANDB_SWEEP_ID" in env
        decided = of_agent or any(env.get(key) for key in ("WANDB_MODE", "WANDB_DISABLED"))
        given = env.get("WANDB_NAME")
        return {
            "project": self.project or (None if of_agent else env.get("WANDB_PROJECT") or "kvsim"),
            "entity": self.entity,
            "mode": self.mode or (None if decided else "offline"),
            "group": self.group or env.get("WANDB_RUN_GROUP") or group,
            "tags": self.tags,
            "name": name if given is None else given if group is None else f"{given} {name}",
        }

    def _log_result(self, wandb: Any, run: Any, folder: Path, result: RunRecord) -> None:
        requests = read_requests(folder, result)
        run.define_metric(axis(result), summary="none", hidden=True)
        run.define_metric("timeline/*", step_metric=axis(result), summary="none")
        run.summary.update(summary(result))
        tables = {"tiers": wandb.Table(*_tiers(result))}
        if self.request_rows:
            columns, rows = request_rows(requests, list(result["hit_tokens"]), self.request_rows)
            tables["requests"] = wandb.Table(columns=columns, data=rows)
        run.log(tables | _pictures(wandb, result))
        for point in series(result, requests):
            run.log(point)
        files = ("result.json", *(("report.html",) if self.page else ()))
        _add_files(wandb, run, f"run-{run.id}", [folder / name for name in files])


def _tiers(result: RunRecord) -> tuple[list[str], list[list[Any]]]:
    columns = ["tier", "capacity_pages", "peak_pages", "inserted_pages", "evicted_pages", "hit_tokens", "hit_pages"]
    rows = [
        [tier, *(use[column] for column in columns[1:5]), result["hit_tokens"][tier], result["hit_pages"][tier]]
        for tier, use in result["tiers"].items()
    ]
    return columns, rows


def _pictures(wandb: Any, result: RunRecord) -> dict[str, Any]:
    from kvsim.report.pictures import figures

    return {title: wandb.Plotly(figure) for title, figure in figures(result)}


def _log_comparison(wandb: Any, run: Any, folder: Path, runs: Sequence[Run]) -> None:
    """Log the table of a sweep, its pictures, and its page."""
    from kvsim.report.comparison.sweep_picture import sweep_figure

    columns = columns_of(comparison_csv(runs).splitlines())
    cells = [[None if cell != cell else cell for cell in column.tolist()] for column in columns.values()]
    logged = {"jobs": wandb.Table(columns=list(columns), data=[list(row) for row in zip(*cells, strict=True)])}
    comparison = Comparison(runs)
    for measure in comparison.measures:
        if comparison.keys and measure.better:
            with suppress(UsageError):
                logged[measure.title] = wandb.Plotly(sweep_figure(comparison, None, measure.key, None))
    run.log(logged)
    rates = [result["hit_rate"] for result in comparison.results if result["hit_rate"] is not None]
    run.summary.update(
        {"finished": len(comparison.runs), "failed": len(comparison.failed), "best_hit_rate": max(rates, default=None)}
    )
    _add_files(wandb, run, f"sweep-{run.id}", [folder / name for name in ("sweep.csv", "report.html", SHARED_SCRIPT)])


def _add_files(wandb: Any, run: Any, name: str, paths: Sequence[Path]) -> None:
    artifact = wandb.Artifact(name, type="result")
    for path in paths:
        if path.exists():
            artifact.add_file(str(path))
    run.log_artifact(artifact)


@contextmanager
def _inside(place: Path) -> Iterator[None]:
    """Make W&B write below ``place`` only, not to the home or working directory, except where its own variables say otherwise."""
    inside = place.resolve() / "wandb"
    wanted = {
        "WANDB_CACHE_DIR": inside / "cache", "WANDB_CONFIG_DIR": inside / "config", "WANDB_DATA_DIR": inside / "data",
        "WANDB_ARTIFACT_DIR": inside / "artifacts", "WANDB_SILENT": "true",
    }  # fmt: skip
    ours = {name: str(value) for name, value in wanted.items() if name not in os.environ}
    inside.mkdir(parents=True, exist_ok=True)
    os.environ |= ours
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        with suppress(OSError):
            inside.rmdir()  # W&B is off
