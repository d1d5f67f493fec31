"""text_to_sql: answers a question about a database with a query. The tool sql runs queries to try them out."""

from agentrl.workflow.datasets.text_to_sql import DATABASE, FOLDER
from agentrl.workflow.envs import Env
from agentrl.workflow.tools.sql import sql_over


def _tables() -> str:
    script = (FOLDER / DATABASE).read_text(encoding="utf-8")
    return script[script.index("CREATE") : script.index("INSERT")].strip()


text_to_sql = Env(
    system_prompt=(
        f"The tables of a SQLite database:\n\n{_tables()}\n\n"
        "Answer the question with one SELECT that gives what was asked for, in this form:\n```sql\nSELECT ...\n```\n"
        "The tool sql runs a query, so that you can try yours before you answer."
    ),
    tools=(sql_over(FOLDER / DATABASE),),
    rewards={"sql_match": 1.0},
    correct=("sql_match",),
)
