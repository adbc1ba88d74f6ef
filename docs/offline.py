"""Finds what a page would fetch from another server: a browser without a network must show all of it."""

import re

LOADED = ("stylesheet", "preload", "preconnect", "icon")
"""Links that a browser follows by itself."""
ELEMENT = re.compile(r"<(script|img|iframe|source|link)\b[^>]*>")
ELSEWHERE = re.compile(r"\b(?:src|href)=[\"']?(?:https?:)?//")


def fetched(page: str) -> str | None:
    """The first element of an HTML page that makes a browser fetch something from another server; None if there is none."""
    for element in ELEMENT.finditer(page):
        is_followed = element[1] != "link" or any(kind in element[0] for kind in LOADED)
        if is_followed and ELSEWHERE.search(element[0]):
            return element[0]
    return None
