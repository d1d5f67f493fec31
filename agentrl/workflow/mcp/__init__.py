"""Tools of Model Context Protocol (MCP) servers, and the servers' processes."""
