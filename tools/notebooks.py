"""make notebooks: runs notebooks/ in Jupyter's kernel and keeps what their cells show. make notebooks-test: runs them
and compares. Needs the extra `notebooks`.
"""

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"
# What differs from run to run, or from machine to machine: seconds, and the last digits of what is nearly 0.
VARIES = re.compile(r"\b\d\.\d+e-\d\d\b|\bin [\d.]+ s\b|torch [\d.]+(\+\w+)?")


def stable(outputs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What is compared of a cell's outputs: by kind of text, without what varies."""
    return [{kind: VARIES.sub("~", text) for kind, text in _texts(output).items()} for output in outputs]


def _texts(output: dict[str, Any]) -> dict[str, str]:
    data = output.get("data") or {output.get("name", output["output_type"]): output.get("text", output.get("evalue"))}
    return {kind: text if isinstance(text, str) else "".join(text) for kind, text in data.items()}


def run(path: Path) -> Any:
    """The notebook, run from its first cell to its last in an empty directory."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,  # lines that a cell prints are one output, however they arrive
            resources={"metadata": {"path": folder}},
        ).execute()
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def differences(path: Path, notebook: Any) -> Iterator[str]:
    import nbformat

    kept = nbformat.read(path, as_version=4)
    for number, (old, new) in enumerate(zip(kept.cells, notebook.cells, strict=True), 1):
        if old.cell_type == "code" and stable(old.outputs) != stable(new.outputs):
            yield f"{path.name}, cell {number} shows {stable(new.outputs)}\nkept is {stable(old.outputs)}"


def main(compare: bool) -> None:
    import nbformat

    wrong: list[str] = []
    for path in sorted(FOLDER.glob("*.ipynb")):
        start = time.monotonic()
        notebook = run(path)
        if compare:
            wrong += differences(path, notebook)
        else:
            nbformat.write(notebook, path)
        cells = sum(cell.cell_type == "code" for cell in notebook.cells)
        print(f"{path.name}: {cells} cells in {time.monotonic() - start:.0f} s", flush=True)
    if wrong:
        sys.exit("\n".join(wrong))
    print("every cell shows what is kept" if compare else "kept")


if __name__ == "__main__":
    main(compare=sys.argv[1:] == ["--compare"])
