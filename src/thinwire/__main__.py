"""Runs the command line as `python -m thinwire`, which torchrun needs."""

from thinwire.cli import main

if __name__ == "__main__":
    main()
