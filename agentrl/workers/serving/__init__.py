"""Tools over HTTP, for agents outside of agentrl."""
