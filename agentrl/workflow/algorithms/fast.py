"""Fast: one pass over the tasks, to try an agent. It scores the episodes, and changes neither prompts nor weights."""

from agentrl.workflow.algorithms import Search

fast = Search(name="fast", function="agentrl.workflow.search.once:run", chooses=False)
