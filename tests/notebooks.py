"""Notebooks of the repository: tests execute the cells, and check that git has no outputs."""

import json
import pathlib

import nbclient
import nbformat
from nbformat import NotebookNode

from tests.processes import environment_with


def check_source(notebook: pathlib.Path) -> dict:
    """Checks that a notebook is valid, is for Python, and has no outputs; returns its JSON."""
    content = json.loads(notebook.read_text("utf-8"))
    nbformat.validate(content)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    for cell in content["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell["id"]
    return content


def execute(
    notebook: pathlib.Path, folder: pathlib.Path, settings: pathlib.Path, last_cell: str = "", **variables: str
) -> dict[str, list[NotebookNode]]:
    """Executes a notebook on one CPU device, from the first cell to the last.

    Args:
      notebook: the .ipynb file, which does not change.
      folder: the folder in which the kernel starts.
      settings: a folder for the settings of IPython, in place of the settings of the user.
      last_cell: Python that runs after the cells of the notebook, as the cell `last`.
      **variables: environment variables of the kernel.

    Returns:
      The outputs by the id of their cell. An error in a cell raises `nbclient.exceptions.CellExecutionError`.
    """
    cells = nbformat.read(notebook, as_version=4)
    if last_cell:
        cells.cells.append(nbformat.v4.new_code_cell(last_cell, id="last"))
    client = nbclient.NotebookClient(
        cells, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment_with(**variables) | {"IPYTHONDIR": str(settings)})
    outputs = {cell.id: cell.get("outputs", []) for cell in cells.cells}
    assert all(output.output_type != "error" for parts in outputs.values() for output in parts)
    return outputs


def printed(outputs: list[NotebookNode]) -> str:
    """Returns the text that a cell has printed, without the value of its last line."""
    return "".join(output.get("text", "") for output in outputs)


def shown(outputs: list[NotebookNode]) -> str:
    """Returns the value of the last line of a cell as text; "" if the line has no value."""
    return "".join(output["data"]["text/plain"] for output in outputs if output.output_type == "execute_result")
