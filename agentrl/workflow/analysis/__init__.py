"""The analysis of stored episodes: their verification, the comparison of two episodes, and the updates that other algorithms
would have computed from the same episodes.
"""
