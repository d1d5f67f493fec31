"""The read side of the store: named queries for commands, the page and exports. The queries return plain values; a query of a
list returns one page.

A list is a function of a filter and a `Paging`. For example, `list_episodes(db, EpisodeFilter(run="first"), Paging(size=50))`
returns a `Page` of `EpisodeRow`. The page's `next` is the cursor of the following page. `db` is a `Database`, a `Reader` or an
open transaction. A row is an immutable value; its fields are the columns of its view (`tables.views`).
"""
