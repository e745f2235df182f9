# `python -m bertjax` is the command `bertjax`.
from bertjax.cli.commands import main

if __name__ == "__main__":
    main()
