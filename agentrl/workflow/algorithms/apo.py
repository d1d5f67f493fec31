"""APO: improves prompts by critique, edits and beam search. Source: arXiv 2305.03495."""

from agentrl.workflow.algorithms import Search

apo = Search(
    name="apo",
    function="agentrl.workflow.search.beam:run",
    options={"batch_tasks": 4, "rounds": 3, "beam_width": 4, "branch_factor": 4},
)
