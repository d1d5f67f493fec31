"""Fast: one pass over the tasks, for trying an agent: it scores, and changes nothing."""

from agentrl.workflow.algorithms import Search

fast = Search(name="fast", function="agentrl.workflow.search.once:run", chooses=False)
