"""`python -m thinwire`, for torchrun."""

from thinwire.cli import main

if __name__ == "__main__":
    main()
