"""The public face, as `import agentrl` gives it: values of a store, and what makes more of them. See `agentrl.__all__`.

- `store`    a store that was opened: its runs, its episodes, SQL
- `run`      one run: its curve, its rows, its policies
- `episode`  one whole episode
- `lists`    lists that are read page by page, and leave as a DataFrame, an Arrow table or a dataset
- `curve`    rewards over iterations, drawn
- `html`     what a notebook shows
"""
