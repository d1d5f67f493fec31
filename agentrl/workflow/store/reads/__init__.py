"""The read side: what commands, a page or an export ask of the rows, by name. Values out; a list comes in pages.

A list is a function of a filter and a `Paging`: `list_episodes(db, EpisodeFilter(run="first"), Paging(size=50))` gives a `Page`
of `EpisodeRow`, whose `next` is the cursor that goes on from there. `db` is a `Database` or a `Reader`. A row is frozen; its
fields are the columns of its view.

- `paging`          pages, their cursors, rows as values
- `changes`         what may have changed of a run since somebody looked
- `run_rows`        runs, and how far one is
- `run_summaries`   what a list shows of runs beside their rows
- `run_details`     what one run is made of
- `label_rows`      tags and notes of runs
- `curves`          the curves of a run, one row an iteration
- `series`          any number of any view over the iterations
- `lanes`           who worked when
- `live_state`      a few numbers that move with what a live view shows
- `task_rows`       tasks over the iterations
- `iteration_rows`  iterations and their optimizer steps
- `iteration_details`  one iteration whole
- `group_rows`      the episodes of one task in one iteration
- `siblings`        those side by side
- `episode_rows`    episodes, and one whole
- `episode_shape`   the steps of one, with places and lengths, and no text or token
- `episode_relations`  what belongs to one beside its turns
- `episode_texts`   one text of one, by its path
- `step_rows`       turns
- `turn_rows`       turns as a page shows them, long texts cut
- `token_rows`      exact tokens of some steps
- `call_rows`       tool calls
- `agent_attempt_rows`  attempts of agents from outside
- `annotation_rows`  what agents, tools and hooks said
- `resource_rows`   versions of the texts that runs work with
- `prompt_rows`     those versions as a page lists them
- `reward_rows`     the parts of rewards
- `credit_rows`     what an advantage was computed from
- `ledger`          what became of every planned episode
- `eval_results`    what evaluations came to
- `eval_tasks`      the tasks of two evaluations
- `event_rows`      what happened to a run
- `open_work`       who holds what, and what waits in which queue
- `lineage`         which run comes from which
- `provenance`      what made an episode, for --verify
- `update_inputs`   what an update was made of, for whatif
- `user_sql`        a person's own SELECT
"""
