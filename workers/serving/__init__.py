"""Tools over HTTP, for agents that are no job of ours."""
