"""Files that repeat a declaration: the Trainer's typed keywords, the table of options in the docs, the types of columns."""
