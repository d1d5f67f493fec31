"""Messages to tokens and back: chat templates, the calls in a turn, the texts that end it."""
