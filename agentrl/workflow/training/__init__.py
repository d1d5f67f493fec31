"""Training: advantages, losses, updates and trainers, and the offline trainings `sft` and `dpo`, which need no run."""
