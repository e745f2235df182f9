"""Runs the command `bertjax`, as `python -m bertjax`."""

from bertjax.cli.commands import main

if __name__ == "__main__":
    main()
