"""The cache. Whatever computes a result imports it, so compiled modules that are out of date end the run here."""

from kvsim.compiled import build_name

build_name()
