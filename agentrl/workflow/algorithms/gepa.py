"""GEPA: improves prompts by reflection and a Pareto front, with the package `gepa`. Source: arXiv 2507.19457."""

from agentrl.workflow.algorithms import Search

gepa = Search(
    name="gepa",
    function="agentrl.workflow.search.pareto:run",
    options={"batch_tasks": 3, "max_rollouts": 300},
    needs="gepa",
)
