"""plain: only the messages of the task, for your own rewards and tools: `--env plain --reward mine:it`."""

from agentrl.workflow.envs import Env

plain = Env()
