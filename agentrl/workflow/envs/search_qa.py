"""search_qa: questions about an invented country, and a tool that searches the texts about it.

For your own collection write an env like this one, `tools=(search_in("/data/manuals"),)`, or use `--env qa --tools search` with
AGENTRL_SEARCH set.
"""

from agentrl.workflow.datasets.search_qa import texts
from agentrl.workflow.envs import Env
from agentrl.workflow.tools.search import Passage, search_in

search_qa = Env(
    system_prompt=(
        "Find the answer with the tool search; search again where one text leads to another. "
        "Then answer with the name, word or number that was asked for and nothing else."
    ),
    tools=(search_in(lambda: (Passage(title, text) for title, text in texts())),),
    rewards={"text_answer": 1.0},
    correct=("text_answer",),
)
