"""The store: every query by name, values in and values out. Only `workers` and `cli` open it.

- `connect`         the database, its transactions, its migrations' state
- `driver_reader`   the database for who only looks: the driver alone
- `migrate`         Alembic under a lock, views and triggers
- `rows`            rows to values: whole episodes
- `row_values`      what one row says, and back
- `planning`        a run and its iterations are written, sent and cancelled
- `iterations`      what an iteration consists of
- `extending`       a run is made longer
- `forks`           episodes leave a stored one at a step; stored groups are trained on
- `rollout_claims`  groups are claimed, handed back, finished
- `steps`           a step's two transactions: sampled, observed
- `tool_calls`      tool calls are started once in effect and answered once
- `episode_annotations`  what agents, tools and hooks said of episodes
- `groups`          what an iteration trains on, with the rewards of a set
- `train_claims`    iterations are claimed for training, or sampled on
- `train_commits`   updates are committed, policies published
- `run_resources`   versions of a run's texts, and which a group works with
- `search_rounds`   what a search tries, asks and chooses
- `repair`          broken checkpoints are made again
- `reward_sets`     rewards beside the first
- `evals`           evaluations are planned and found
- `offline_data`    episodes to learn from apart from a run
- `retention`       which checkpoints are kept
- `vacuum`          the database is compacted
- `reads`           what commands, a page or an export want to know, a page at a time
- `control_reads`   what the control loop and the services want to know
"""
