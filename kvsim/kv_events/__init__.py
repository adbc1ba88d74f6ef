"""KV events: what vLLM and SGLang publish of their caches over ZMQ, read and written."""
