"""What every HTTP server of ours does with a body and a reply."""
