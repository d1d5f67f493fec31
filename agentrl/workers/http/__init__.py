"""HTTP for all servers: requests with limits, responses, errors and the server itself."""
