"""The store: every query by name, values in and values out. Only `workers` and `cli` open it.

- `connect`   the database, its transactions, its migrations' state
- `planning`  a run and its iterations are written, sent and cancelled
- `iterations` what an iteration consists of
- `forks`     episodes leave a stored one at a step; stored groups are trained on
- `rollout`   groups are claimed, handed back, finished
- `steps`     a step's two transactions: sampled, observed
- `calls`     tool calls are started once in effect and answered once
- `groups`    what an iteration trains on, with the rewards of a set
- `claims`    iterations are claimed for training, or sampled on
- `offline`   episodes to learn from apart from a run
- `training`  updates are committed, policies published
- `scoring`   reward sets beside the first
- `ledger`    what became of every planned episode
- `keeping`   checkpoints are collected
- `mending`   broken checkpoints are made again
- `compact`   the database is compacted
- `migrate`   Alembic under a lock, views and triggers
- `rows`      rows to values: whole episodes
- `values`    what one row says, and back
- `reader`    the database for who only looks
- `observe`   what a person wants to know
- `serving`   what the control loop and the services want to know
"""
