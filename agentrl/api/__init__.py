"""The Python API of `import agentrl`: trainers, stores, runs, episodes and policies. `agentrl.__all__` lists it.

- `store`    a store that was opened: its runs, its episodes, SQL
- `run`      one run: its curve, its rows, its policies
- `episode`  one whole episode
- `lists`    lists that are read page by page, and leave as a DataFrame, an Arrow table or a dataset
- `curve`    rewards over iterations, drawn
- `html`     what a notebook shows
"""
