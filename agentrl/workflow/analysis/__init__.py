"""Analysis of stored episodes: verification, differences between two, and updates by other algorithms."""
