"""Who runs agents: one process for each episode, watched, bounded, ended whole."""
