"""Tests of what compilers of other releases make of the programs (`make test-chip`); `make test` has none of these."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("jax_cuda13_plugin") else ["test_*.py"]
