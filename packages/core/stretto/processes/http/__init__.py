"""HTTP helpers that all servers share: bodies, replies, names, bounds."""
