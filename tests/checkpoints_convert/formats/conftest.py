"""Lets the tests here import `encoders`, which packs weights by hand, and `golden_files`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
