"""The page over the rows, `agentrl ui`: a read-only service, the page's files, exports into one file."""
