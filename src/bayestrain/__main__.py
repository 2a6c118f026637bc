"""`python -m bayestrain`: the command line."""

from bayestrain.cli import main

main()
