"""``torchboost pca``: the basis of dimension-reduced training from a folder of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchboost.algorithms.dim_reduce.files import checkpoint_files, layout_of_file, read_checkpoints, write_matrix
from torchboost.cli.output import fail, print_json, user_errors
from torchboost.cli.progress import display

__all__ = ["pca"]


def pca(
    folder: Annotated[Path, typer.Argument(help="Checkpoints of one model: .safetensors, or .pt with tensors only.")],
    components: Annotated[int, typer.Option(min=1, help="Number of directions.")] = 32,
    out: Annotated[
        Path, typer.Option(help="The .npy file to write; a .json with the same name lists the columns.")
    ] = Path("pca.npy"),
    exclude: Annotated[
        str, typer.Option(help="Entries that are not trained parameters: name patterns, comma-separated.")
    ] = "*running_mean,*running_var",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file in --out and its .json.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Compute the principal components of the weights in checkpoints, for dim_reduce.pca_mat_path."""
    if out.suffix != ".npy":
        fail(f"--out: found {out}; give a file that ends in .npy.")
    for file in (out, out.with_suffix(".json")):
        if file.exists() and not force:
            fail(f"--out: {file} already exists; choose another file, or overwrite it with --force.")
    if not out.parent.is_dir():
        fail(f"--out: the folder {out.parent} does not exist; create it first.")
    patterns = [pattern.strip() for pattern in exclude.split(",") if pattern.strip()]
    with user_errors(), display() as shown:
        try:
            files = checkpoint_files(folder)
            layout = layout_of_file(files[0], patterns)
            explained = write_matrix(out, read_checkpoints(files, layout), layout, components, progress=shown)
        except ValueError as error:
            fail(str(error))
    answer = {
        "out": str(out),
        "components": components,
        "checkpoints": len(files),
        "parameters": len(layout.names),
        "weights": layout.length,
        "explained": explained,
    }
    if json:
        print_json(answer)
        return
    typer.echo(
        f"wrote {out}: {components} directions of {answer['weights']:,} weights in {answer['parameters']} parameters, "
        f"from {len(files)} checkpoints; they explain {explained:.1%} of the variance"
    )
