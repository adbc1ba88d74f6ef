"""Follows live engines: their trees from their events, and ghost caches with other settings that serve the same requests."""
