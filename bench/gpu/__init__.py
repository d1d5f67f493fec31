"""`make gpu-check`: what only a GPU can say, on a machine with little more than Python, torch, transformers and peft.

`python3 -m bench.gpu [PART ...]` runs the parts, each in a process of its own that ends after four minutes at most, whatever it
has by then; each writes `OUT/PART.json` after every row, and a line per row on the screen. A row that cannot be made says why;
the exit code is 1 where one did, or where a part did not come to its end. `OUT/summary.md` has the tables.

Without a GPU the same parts run on the CPU with small models and sizes: the code is tried, the numbers mean nothing.

Nothing need be installed: the library is read from this folder, and what the machine lacks comes from wheels that
`make gpu-wheels` put into `build/gpu-wheels`. A part is a module here, named in `__main__.PARTS`, with

    def measure(part: Part) -> None  # kept.py: adds rows as they are made, knows how much time is left
"""
