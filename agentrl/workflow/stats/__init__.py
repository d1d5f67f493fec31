"""Statistics: evaluations, paired tests, the variance of groups, selection of episodes. This package does not import torch."""
