"""Run docs/tour.ipynb and keep its small outputs: `make tour`. What a run prints on the way is left out."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

PAGE = Path(__file__).with_name("tour.ipynb")

if __name__ == "__main__":
    notebook = nbformat.read(PAGE, as_version=4)
    NotebookClient(notebook, timeout=1200, kernel_name="python3").execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
            for output in cell.outputs:
                output.pop("execution_count", None)
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, PAGE)
