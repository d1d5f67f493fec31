"""What a worker does with a message: rollouts, tool calls, updates. A job loads, calls the library, stores."""
