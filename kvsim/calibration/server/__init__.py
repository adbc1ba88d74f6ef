"""Measures the steps of a running server by batches of known work, and fits a machine to them."""
