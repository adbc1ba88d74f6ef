"""Reads one YAML file of settings, and says in one line what is wrong with it."""

import traceback
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsim.errors import UsageError, first_line

UNREADABLE = (yaml.YAMLError, UnicodeDecodeError, RecursionError)
"""What is raised for a file that is not YAML, or whose lists lie too deep in each other."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the settings in a file, references unresolved. Raises UsageError for one that has no mapping of settings."""
    try:
        settings = OmegaConf.to_container(OmegaConf.load(path))
    except UNREADABLE as error:
        raise UsageError(explain_file(error, path)) from error
    except FileNotFoundError as error:
        raise UsageError(f"{path}: there is no such file") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except OmegaConfBaseException as error:
        raise UsageError(f"{path}: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: it must be a mapping of settings")
    return {str(name): value for name, value in settings.items()}


def explain_file(error: Exception, path: Path | None = None) -> str:
    """Return one line that names the file of settings that cannot be read, and the line in it."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        return f"{mark.name}:{mark.line + 1}: not valid YAML: {error.problem}"
    if isinstance(error, yaml.reader.ReaderError):
        return f"{path or error.name}: not a YAML file: {error.reason}"
    paths = [path, *(frame.f_locals.get("full_path") for frame, _ in traceback.walk_tb(error.__traceback__))]
    named = next((path for path in paths if path is not None), "a file of settings")
    return f"{named}: not a YAML file: {error.reason if isinstance(error, UnicodeDecodeError) else error}"
