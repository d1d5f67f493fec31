"""Jobs, one per kind of message: rollouts, tool calls, updates. A job loads, calls the library, stores."""
