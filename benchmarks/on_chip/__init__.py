"""One command for a machine with a chip: parity, rates, rooflines, whole models and block sizes, in pieces.

`python -m benchmarks.on_chip` needs JAX, this tree and what `requirements.txt` lists. See README.md in this folder.
"""
