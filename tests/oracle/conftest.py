"""Lets the tests here import `families` and `parity`, as `make_golden.py` does when run as a script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
