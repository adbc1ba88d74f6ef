"""What requests and events come from: a proxy, logs that grow, engines' KV events."""
