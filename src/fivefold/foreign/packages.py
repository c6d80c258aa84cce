"""What a proof depends on beside the adapter's file: versions of packages, and files of the user's own."""

import hashlib
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

from fivefold.foreign.adapter import AdapterFile

_PACKAGES = ["torch", "transformers", "torchtitan", "megatron", "accelerate", "deepspeed", "nemo", "lightning", "numpy"]


def versions() -> dict[str, str]:
    """Of the packages in use here, those with compiled code or parallelism in them."""
    of = packages_distributions()
    found = {of[name][0] for name in _PACKAGES if name in sys.modules and name in of}
    return {name: version(name) for name in sorted(found)}


def files_beside(place: AdapterFile) -> dict[str, str]:
    """SHA-256 of each file that was imported from the adapter's directory, by its path there: it is no package that has
    a version. Nothing of an adapter that ships."""
    if place.ships:
        return {}
    home, found = place.file.parent, {}
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        installed = "site-packages" in path.parts or path.is_relative_to(sys.prefix)
        if path != place.file and path.is_relative_to(home) and not installed and path.is_file():
            found[path.relative_to(home).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))
