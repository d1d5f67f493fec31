"""The analysis of stored episodes: verification, the comparison of two episodes, and updates by other algorithms."""
