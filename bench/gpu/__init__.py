"""`make gpu-check`: what only a GPU can tell, on a machine with little more than Python, torch, transformers and peft.

`python3 -m bench.gpu CALL|PART ... --out OUT` runs the parts of a call (1, 2 or 3), or the parts that are named, each in a
process of its own. A call ends after eight minutes. A part may not use the time reserved for later parts. A part that overruns
is killed; a part with no time left is reported. Each row is printed and written to `OUT/PART.json` as soon as it is measured;
`OUT/summary.md` has the tables. The exit code is 1 if a row failed or a part is not complete.

Nothing has to be installed: the library is read from this folder, and wheels and model files come from `build/gpu-1`,
`gpu-2` and `gpu-3`, which `make gpu-wheels` makes (`prepare`). What an earlier call brought or made there is used again. A part
whose packages are missing is reported, and the others run.

Without a GPU the same parts run on the CPU with small models and sizes: the code is tried, the numbers mean nothing.

A part is a module here, named in `__main__.PARTS`, with

    def measure(part: Part) -> None  # part.py: adds rows as they are measured, knows how much time is left
"""
