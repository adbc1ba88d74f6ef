"""The policies that ``kvsim new`` copies: for each family a class, its settings and its test."""
