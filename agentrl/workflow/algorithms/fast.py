"""Fast: one pass over the tasks, to try an agent. It scores the episodes and changes nothing."""

from agentrl.workflow.algorithms import Search

fast = Search(name="fast", function="agentrl.workflow.search.once:run", chooses=False)
