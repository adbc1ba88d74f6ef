"""Models in the local cache of Hugging Face: read where they are, never downloaded.

The layout is that of huggingface_hub: ``models--ORG--NAME/refs/main`` has the commit, ``snapshots/COMMIT`` the files.
"""

import os
import re
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
COMMIT = re.compile(r"[\w.-]+", re.ASCII)


def cache_folder() -> Path:
    """Return the folder of the cache: HF_HUB_CACHE, ``hub`` in HF_HOME, or the default."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(name):
            return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def find_model(name: str) -> Path:
    """Return the path that a user means: the path itself or, for ORG/NAME that is no path, the model's folder in the cache.

    Returns the path itself, too, where the cache has no such model.
    """
    path = Path(name).expanduser()
    if not NAME.fullmatch(name) or path.exists():
        return path
    folder = cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return path
    snapshot = folder / "snapshots" / commit
    return snapshot if COMMIT.fullmatch(commit) and snapshot.is_dir() else path


def not_cached(name: str) -> str:
    """Say that a name of the form ORG/NAME is not in the cache either; nothing for other names and for a model that is there."""
    if not NAME.fullmatch(name) or find_model(name) != Path(name).expanduser() or Path(name).expanduser().exists():
        return ""
    return f"; nor is the model in the Hugging Face cache {cache_folder()} (hf download {name} stores it there)"
