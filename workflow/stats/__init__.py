"""What numbers say: evaluations, paired tests, the variance of groups. Without torch."""
