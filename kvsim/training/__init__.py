"""Trains policies that learn from a trace: what leaves look like when a victim is chosen, and which one should go."""
