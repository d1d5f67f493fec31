"""The store: every query by name, values in and values out. Only `workers` and `cli` open it.

`connect` has the database and its transactions. The other modules are named by what they write: `planning` runs and iterations,
`rollout_claims` and `steps` a rollout's commits, `tool_calls`, `train_claims` and `train_commits` an update's, `leases` the
claims of lost workers. `episode_loader` and `row_codecs` turn rows into values; `reads` has what commands, the page and exports
ask for.
"""
