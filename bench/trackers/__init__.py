"""The trackers as they are: real packages, each in its offline mode or its own local files, read back by their own means."""
