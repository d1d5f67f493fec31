"""Files that are made from the config: the Trainer's typed keywords, and the table of options in the docs."""
