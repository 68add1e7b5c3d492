"""Many turns as tokens: the forest of a trajectory, chat messages, the turns and calls on record."""
