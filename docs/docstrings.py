"""Makes tables of docstrings' aligned columns, where mkdocstrings shows them."""

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from reference import with_tables


class AlignedTables(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_tables(obj.docstring.value)
