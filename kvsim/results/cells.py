"""Text in cells of CSV files. Spreadsheets take text that begins like a formula for one; a ' before it says that it is text."""

from typing import Any

FORMULAS = ("=", "+", "-", "@", "\t", "\r")
"""What the formulas of spreadsheets begin with, besides white space."""


def as_text(value: Any) -> Any:
    """Return the cell for a value: text that a spreadsheet would take for a formula begins with a ', numbers stay as they are."""
    return f"'{value}" if isinstance(value, str) and _is_formula(value) else value


def from_text(cell: str) -> str:
    """Return the text of a cell that ``as_text`` has made."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell[1:]) else cell


def _is_formula(text: str) -> bool:
    return text.lstrip("'").startswith(FORMULAS) and not _is_number(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
