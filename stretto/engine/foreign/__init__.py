"""What runs inside a server of another make, in that server's environment; nothing of stretto imports it."""
