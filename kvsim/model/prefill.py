"""FLOPs of a prefill, by what a model needs per token and per pair of query and key. Compiled: simulations ask at every step."""


def attention_pairs(tokens: float, start: float, window_share: float, window_tokens: float) -> float:
    """Pairs of query and key when ``tokens`` tokens follow ``start`` cached ones, as a mean over the attention layers.

    ``window_share`` of these layers attend to ``window_tokens`` tokens only.
    """
    pairs = tokens * start + tokens * (tokens + 1) / 2
    if not window_share:
        return pairs
    growing = min(tokens, max(0.0, window_tokens - start))
    in_window = growing * start + growing * (growing + 1) / 2 + (tokens - growing) * window_tokens
    return pairs + window_share * (in_window - pairs)


class PrefillFlops:
    """The FLOPs of prefills, without the lm_head."""

    def __init__(self, linear: float, pair: float, prefix: float, window_share: float, window_tokens: float) -> None:
        """FLOPs per token, per pair of query and key, and per cached token before the prefill; windows as above."""
        self.linear = linear
        self.pair = pair
        self.prefix = prefix
        self.window_share = window_share
        self.window_tokens = window_tokens

    def of(self, tokens: float, start: float) -> float:
        """FLOPs to prefill ``tokens`` prompt tokens after ``start`` cached tokens.

        Attention is causal: the i-th new token attends to ``start + i`` keys, including its own.
        """
        pairs = attention_pairs(tokens, start, self.window_share, self.window_tokens)
        return self.linear * tokens + self.pair * pairs + self.prefix * start
