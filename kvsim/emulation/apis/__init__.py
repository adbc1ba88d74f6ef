"""The interfaces that an emulated server may have: one file each, and a row in ``table.py``."""
