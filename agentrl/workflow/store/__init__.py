"""The store: one named function per database query, with plain values as arguments and results. Only `workers`, `cli` and `api`
import it.

`connect` opens the database and runs transactions. The other modules are named after what they write. `planning` writes runs
and iterations. `rollout_claims` and `steps` write the commits of a rollout, and `tool_calls` writes tool calls. `train_claims`
and `train_commits` write the commits of an update. `leases` ends the claims of lost workers. `episode_loader` and `row_codecs`
convert rows to values. `reads` has the queries of commands, the page and exports.
"""
