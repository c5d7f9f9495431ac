"""`python -m jaxinfer.cli` is `jaxinfer`."""

from jaxinfer.cli.main import main

main()
