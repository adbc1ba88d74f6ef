"""Puts the folders of the user's policies on Hydra's search path."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

from kvsim.settings.sources import check_names, sources


class OwnFolders(SearchPathPlugin):
    """Called by Hydra before it reads any file."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the folders. Raises UsageError if two of them offer the same choice."""
        check_names()
        for source in sources():
            search_path.append(source.provider, f"file://{source.conf}")


def extend_search_path() -> None:
    """Let Hydra ask ``OwnFolders`` from now on."""
    Plugins.instance().register(OwnFolders)
