"""``python -m gem``: the same command line as the installed ``gem``."""

from gem.cli import main

if __name__ == "__main__":
    main()
