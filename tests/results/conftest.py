"""The outcomes that these tests look at."""

from tests.outcomes import clustered, handed_over, outcome_of, replayed, simulated

__all__ = ["clustered", "handed_over", "outcome_of", "replayed", "simulated"]
