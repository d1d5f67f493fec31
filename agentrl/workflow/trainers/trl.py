"""TRL's `GRPOTrainer` (the extra `trl`): see `training.trl_trainer`."""

from agentrl.workflow.trainers import TrainerBackend

trl = TrainerBackend(
    "trl", "agentrl.workflow.training.trl_trainer:TrlTrainer", "agentrl.workflow.training.trl_options:check_run"
)
