"""The conversion of messages to tokens and back: chat templates, the parts of a sampled turn, stop strings."""
