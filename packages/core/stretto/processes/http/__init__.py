"""HTTP server, and helpers for ASGI applications: request bodies, replies, check of the Host, metrics."""
