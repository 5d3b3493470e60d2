"""Run a notebook and write it down with its outputs: SOURCE.ipynb DIRECTORY TARGET.ipynb."""

from __future__ import annotations

import sys

import nbformat
from engines import START_SECONDS
from nbclient import NotebookClient


def main() -> None:
    source, directory, target = sys.argv[1:]
    notebook = nbformat.read(source, as_version=4)
    client = NotebookClient(
        notebook, timeout=START_SECONDS, resources={"metadata": {"path": directory}}
    )
    try:
        client.execute()
    finally:
        nbformat.write(notebook, target)


if __name__ == "__main__":
    main()
