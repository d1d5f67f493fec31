"""The read side: what commands, a page or an export ask of the rows, by name. Values out; a list comes in pages.

A list is a function of a filter and a `Paging`: `list_episodes(db, EpisodeFilter(run="first"), Paging(size=50))` gives a `Page`
of `EpisodeRow`, whose `next` is the cursor that goes on from there. `db` is a `Database`, a `Reader` or an open transaction. A
row is frozen; its fields are the columns of its view (`tables.views`).
"""
