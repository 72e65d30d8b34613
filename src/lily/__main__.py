"""`python -m lily` is the command line."""

from lily.cli import main

main()
