"""`python -m reshard`."""

from reshard.cli import main

main()
