"""The HTTP servers: the endpoint for agents, served policies, and tools for outside programs."""
