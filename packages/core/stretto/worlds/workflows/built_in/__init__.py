"""The workflows that are built in."""
