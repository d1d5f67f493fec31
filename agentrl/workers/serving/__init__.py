"""The HTTP servers: the endpoint for agents, the server of a policy, and the server of tools for other programs."""
