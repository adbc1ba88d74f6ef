"""Runs beside live engines: follows their caches and requests, and serves the same requests from ghost caches."""
