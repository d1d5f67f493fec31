"""plain: the task's words and nothing else, for rewards and tools of your own: `--env plain --reward mine:it`."""

from agentrl.workflow.envs import Env

plain = Env()
