"""Tools of Model Context Protocol servers, and the servers' processes."""
