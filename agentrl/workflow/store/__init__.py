"""The store: one named function per database query, with plain values as arguments and results. Only `workers` and `cli` open
it.

`connect` has the database and its transactions. The other modules are named after what they write: `planning` writes runs and
iterations, `rollout_claims` and `steps` the commits of a rollout, `tool_calls` the tool calls, `train_claims` and
`train_commits` the commits of an update, `leases` the claims of lost workers. `episode_loader` and `row_codecs` convert rows to
values. `reads` has the queries of commands, the page and exports.
"""
