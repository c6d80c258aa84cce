"""A checkpoint of version 1, as PyTorch's DCP wrote it: one tiny model (one layer, hidden size 4) after two steps under
dp=2,zero=1. `state.json` has the digest of every tensor of its state, gathered."""

import json
import tarfile
from pathlib import Path

HERE = Path(__file__).parent
STATE: dict[str, str] = json.loads((HERE / "state.json").read_text())
MODEL = ["model.layers=1", "model.hidden=4", "model.heads=2", "model.kv_heads=1", "model.head_dim=2", "model.ffn=4",
         "model.tied=true", "train.batch=4", "run.name=old"]  # fmt: skip


def unpack(run: Path) -> Path:
    """A run's directory with the checkpoint in it."""
    (run / "checkpoints").mkdir(parents=True)
    with tarfile.open(HERE / "step-00000002.tar.xz") as archive:
        archive.extractall(run / "checkpoints", filter="data")
    return run
