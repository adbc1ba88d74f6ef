"""The cache core. Every run imports it, so stale compiled modules stop the run here."""

from kvsim.installation import build_name

build_name()
