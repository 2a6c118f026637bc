"""`python -m bayestrain`: the command line."""

from bayestrain.app.cli import main

if __name__ == "__main__":
    main()
