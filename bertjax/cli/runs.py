"""Lists runs.

    bertjax runs [FOLDER...]

Shows the task, the step, the last loss and the last evaluation of each run in the folders (by default runs/), and
whether the run is running, stopped or finished. A sweep is one line; its trials are listed if the folder of the sweep
is named.
"""

from bertjax.cli.app import run_command


def main(folders: list[str]) -> None:
    """Prints the table of runs."""
    from bertjax.common.errors import UserError
    from bertjax.reporting import overview

    rows = overview.rows(folders or ["runs"])
    if not rows:
        remedy = "bertjax train starts a run, and bertjax runs FOLDER lists the runs in another folder"
        raise UserError(f"no runs in {', '.join(folders or ['runs/'])}; {remedy}")
    print(overview.table(rows), flush=True)


if __name__ == "__main__":
    run_command(main)
