"""The page of `agentrl ui`: a read-only service over the database, the page's files, and exports to one file."""
