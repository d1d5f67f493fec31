"""The agents worker: one process for each episode, supervised, limited and ended with all its children."""
