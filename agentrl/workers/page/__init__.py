"""The page of `agentrl ui`: a service that only reads the database, the page's files, and exports of a run to one file."""
