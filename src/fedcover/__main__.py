"""Entry point of ``python -m fedcover``."""

from fedcover.cli import main

if __name__ == "__main__":
    main()
