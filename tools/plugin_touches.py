"""python tools/plugin_touches.py: the files that each plugin is, and every line of src/ that names it or what it is of.

A plugin of examples/plugins touches nothing under src/: no line there names it but for examples in help texts, so that
the tree without its folder is the tree that it was written for. Muon is one of ours: the lines that name it are listed,
and, once for all optimizers like it, the files that ask for the unit "matrix".
"""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


def naming(*words: str) -> list[str]:
    """Lines of src/ with any of these words."""
    return git("grep", "-n", "-i", "-w", *(part for word in words for part in ("-e", word)), "--", "src")


def stat(files: list[str]) -> None:
    for file in files:
        lines = len((ROOT / file).read_text().splitlines())
        print(f"  {file:<70} | {lines:>4} +")


def main() -> None:
    for home in sorted((ROOT / "examples" / "plugins").iterdir()):
        files = git("ls-files", str(home))
        module = next(Path(file).stem for file in (*home.glob("fivefold_*"), home) if file.name.startswith("fivefold_"))
        found = naming(module)
        print(f"{home.name}: {len(files)} files, {len(found)} lines under src/ name {module}")
        stat(files)
        print(*(f"  {line}" for line in found), sep="\n", end="\n" if found else "")
    print("\nMuon: its file, and the lines elsewhere that name it")
    own = "src/fivefold/optim/muon.py"
    stat([own])
    print(*(f"  {line}" for line in naming("muon") if not line.startswith(own)), sep="\n")
    print("\nwhat whole matrices need, once for all such optimizers")
    stat(["src/fivefold/layout/matrix_owners.py", "src/fivefold/parallel/matrices.py", "src/fivefold/cost/matrices.py"])
    asking = naming('"matrix"', "matrix_owners", "reads_whole", "MatrixCost", "matrix_cost", "MatrixOwners")
    counted = Counter(line.partition(":")[0] for line in asking)
    print(*(f"  {file:<70} | {count:>4} lines" for file, count in counted.items()), sep="\n")


if __name__ == "__main__":
    main()
