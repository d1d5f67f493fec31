"""GEPA: prompts learn: reflection and a Pareto front, by the package of that name. Source: arXiv 2507.19457."""

from agentrl.workflow.algorithms import Search

gepa = Search(
    name="gepa",
    function="agentrl.workflow.search.pareto:run",
    options={"batch_tasks": 3, "max_rollouts": 300},
    needs="gepa",
)
