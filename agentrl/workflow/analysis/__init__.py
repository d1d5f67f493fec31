"""The analysis of stored episodes: verification, the comparison of two episodes, and what other algorithms would have done with
them.
"""
