"""Serves requests that arrive while it runs: kvsim's engines on a clock that follows real time, behind a server's interface."""
