"""Logs the configuration, numbers, table, pictures and files of a run to Weights & Biases, offline by default."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from kvsim.report.logger import Logger
from kvsim.report.result import RunRecord
from kvsim.report.timeline import middles

MODES = ("offline", "online")
MOST_POINTS = 1000
"""Most points of a timeline that are logged."""
NOT_NUMBERS = ("config", "versions", "timeline", "ttft_quantiles_s", "bounds", "schema", "command_line", "config_hash", "command",
               "engines")  # fmt: skip


@dataclass(kw_only=True)
class WandbLogger(Logger):
    """Logs each run to W&B. If W&B is not installed or fails, one line says so; the run's folder is complete anyway."""

    wants_page: ClassVar[bool] = True

    project: str = "kvsim"
    mode: str = "offline"
    group: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode}")
        if not self.project:
            raise ValueError("project must not be empty")

    def log(self, folder: Path, result: RunRecord, group: str | None) -> None:
        self._send(folder, folder.name, result["config"], group, lambda wandb, run: _log_result(wandb, run, folder, result), 0)

    def log_failure(self, folder: Path, config: dict[str, Any], error: str, group: str | None) -> None:
        self._send(folder, folder.name, config, group, lambda _, run: run.summary.update({"status": "failed", "error": error}), 1)

    def _send(
        self,
        folder: Path,
        name: str,
        config: dict[str, Any],
        group: str | None,
        log: Callable[[Any, Any], None],
        exit_code: int,
    ) -> None:
        try:
            with _inside(folder):
                import wandb

                run = wandb.init(
                    project=self.project,
                    name=name,
                    group=self.group or group,
                    tags=self.tags,
                    config=config,
                    mode=cast(Any, self.mode),
                    dir=str(folder.resolve()),
                    settings=wandb.Settings(silent=True, disable_git=True, save_code=False, console="off"),
                )
                try:
                    log(wandb, run)
                except BaseException:
                    run.finish(exit_code=1)
                    raise
                run.finish(exit_code=exit_code)
        except Exception as error:  # a problem with W&B must not fail a finished run
            message = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"kvsim: warning: not logged to Weights & Biases: {message}; {folder} is complete", file=sys.stderr)


def _log_result(wandb: Any, run: Any, folder: Path, result: RunRecord) -> None:
    run.summary.update({name: value for name, value in result.items() if name not in NOT_NUMBERS})
    columns = ["tier", "capacity_pages", "peak_pages", "inserted_pages", "evicted_pages", "hit_tokens", "hit_pages"]
    rows = [
        [tier, *(use[column] for column in columns[1:5]), result["hit_tokens"][tier], result["hit_pages"][tier]]
        for tier, use in result["tiers"].items()
    ]
    run.log({"tiers": wandb.Table(columns=columns, data=rows)} | _pictures(wandb, result))
    for point in timeline_points(result):
        run.log(point)
    artifact = wandb.Artifact(f"run-{run.id}", type="result")
    for name in ("result.json", "report.html"):
        if (folder / name).exists():
            artifact.add_file(str(folder / name))
    run.log_artifact(artifact)


def _pictures(wandb: Any, result: RunRecord) -> dict[str, Any]:
    from kvsim.report.pictures import figures

    return {title: wandb.Plotly(figure) for title, figure in figures(result)}


def timeline_points(result: RunRecord) -> Iterator[dict[str, float]]:
    """Yield hit rates by tier over the course of the run, at most ``MOST_POINTS``, in order."""
    hits = result["timeline"]["hits"]
    places = middles(hits["edges"])
    step = -(-len(places) // MOST_POINTS) if places else 1
    for index in range(0, len(places), step):
        rates = {f"timeline/hit_rate_{tier}": hits["hit_rate"][tier][index] for tier in result["tiers"]}
        yield {f"timeline/{hits['axis']}": places[index], **rates}


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Make W&B write below ``folder`` only, not to the home or working directory."""
    inside = folder.resolve() / "wandb"
    names = {
        "WANDB_DIR": folder.resolve(), "WANDB_CACHE_DIR": inside / "cache", "WANDB_CONFIG_DIR": inside / "config",
        "WANDB_DATA_DIR": inside / "data", "WANDB_ARTIFACT_DIR": inside / "artifacts", "WANDB_SILENT": "true",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in names}
    inside.mkdir(parents=True, exist_ok=True)
    os.environ |= {name: str(path) for name, path in names.items()}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        with suppress(OSError):
            inside.rmdir()  # W&B is not installed
