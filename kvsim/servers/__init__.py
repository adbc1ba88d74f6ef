"""Plays a trace against a running server over HTTP, and keeps what a client sees."""
