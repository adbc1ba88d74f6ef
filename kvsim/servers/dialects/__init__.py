"""What engines speak over HTTP: one file each, and a row in ``table.py``."""
