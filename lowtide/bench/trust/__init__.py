"""The campaign of `lowtide bench trust`: random edits of a program between its steps, and what lowtide makes of them.

Two copies of a program, twins, get the same edit and take the same step, one in eager PyTorch and one through lowtide.
All that can be reached from them is compared. Edits are drawn from what the twins are made of, by type; nothing here
knows what lowtide guards. Each program runs in a process of its own: `python -m lowtide.bench.trust PROGRAM DOOR ...`.
"""
