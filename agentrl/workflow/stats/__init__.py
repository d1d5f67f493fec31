"""Statistics: evaluations, paired tests, the variance of groups, selection of episodes. Free of torch."""
