"""Trains the two embedded models again, as a command of `jaxinfer` with its errors and signals."""

import sys

from jaxinfer.cli.main import main
from tools.train_demo.command import register

register()
sys.argv.insert(1, "train-demo")
main()
