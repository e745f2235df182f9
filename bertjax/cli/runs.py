"""Lists runs: bertjax runs [FOLDER...]

Shows of each run within the folders, by default runs/: what it trains, how far it is, its last loss and evaluation, and
whether it is running, stopped or finished. A search is one line; its trials are listed when its own folder is named.
"""

from bertjax.cli.app import run_command


def main(folders: list[str]) -> None:
    from bertjax.common.errors import UserError
    from bertjax.reporting import overview

    rows = overview.rows(folders or ["runs"])
    if not rows:
        raise UserError(f"no runs in {', '.join(folders or ['runs'])}")
    print(overview.table(rows))


if __name__ == "__main__":
    run_command(main)
