"""The read side: what commands, a page or an export ask of the rows, by name. Values out; a list comes in pages.

A list is a function of a filter and a `Paging`: `list_episodes(db, EpisodeFilter(run="first"), Paging(size=50))` gives a `Page`
of `EpisodeRow`, whose `next` is the cursor that goes on from there. `db` is a `Database` or a `Reader`. A row is frozen; its
fields are the columns of its view.

- `paging`          pages, their cursors, rows as values
- `changes`         what may have changed of a run since somebody looked
- `run_rows`        runs, and how far one is
- `iteration_rows`  iterations and their optimizer steps
- `group_rows`      the episodes of one task in one iteration
- `episode_rows`    episodes, and one whole
- `step_rows`       turns
- `call_rows`       tool calls
- `agent_attempt_rows`  attempts of agents from outside
- `annotation_rows`  what agents, tools and hooks said
- `resource_rows`   versions of the texts that runs work with
- `reward_rows`     the parts of rewards
- `ledger`          what became of every planned episode
- `eval_results`    what evaluations came to
- `event_rows`      what happened to a run
- `open_work`       who holds what, and what waits in which queue
- `lineage`         which run comes from which
- `provenance`      what made an episode, for --verify
- `update_inputs`   what an update was made of, for whatif
- `user_sql`        a person's own SELECT
"""
