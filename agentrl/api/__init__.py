"""The Python API of `import agentrl`: trainers, stores, runs, episodes and policies. `agentrl.__all__` lists it.

- `store`    an open store: its runs, its episodes, SQL
- `run`      a run: its curve, its rows, its policies
- `episode`  an episode with all of its steps
- `lists`    lists that are read page by page, with exports to a DataFrame, an Arrow table or a dataset
- `curve`    rewards over iterations, drawn as text or SVG
- `html`     the HTML that notebooks display
"""
