"""Learning: credit, losses, updates, trainers; imitation and preference apart from a run."""
