"""Files that repeat a declaration: typed keywords, types of columns, tables of options and views in the docs."""
