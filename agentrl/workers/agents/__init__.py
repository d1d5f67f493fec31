"""The agents worker: it runs each episode's agent in its own process, limits it, and ends it with all of its children."""
