"""plain: the task's messages and nothing else, for your own rewards and tools: `--env plain --reward mine:it`."""

from agentrl.workflow.envs import Env

plain = Env()
