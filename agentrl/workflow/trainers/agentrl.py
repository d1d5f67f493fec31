"""agentrl's own trainer, for every algorithm: see `training.trainer`."""

from agentrl.workflow.trainers import TrainerBackend

agentrl = TrainerBackend("agentrl", "agentrl.workflow.training.trainer:Trainer")
