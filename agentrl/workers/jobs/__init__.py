"""The jobs, one module per kind of message: rollouts, tool calls, updates. A job loads rows, calls the library and stores the
result.
"""
