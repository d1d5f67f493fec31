"""Training: advantages, losses, updates and trainers; supervised and preference training outside of a run."""
