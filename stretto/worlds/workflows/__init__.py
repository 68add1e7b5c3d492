"""What happens between a prompt and its verdict in many turns: workflows, the users' own and those that are built in."""
