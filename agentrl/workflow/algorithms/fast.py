"""Fast: one pass over the tasks, to try an agent. The episodes are scored; prompts and weights do not change."""

from agentrl.workflow.algorithms import Search

fast = Search(name="fast", function="agentrl.workflow.search.once:run", chooses=False)
