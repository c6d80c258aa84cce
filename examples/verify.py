"""Does a layout compute what one process computes? Every gradient, every byte sent, on real ranks of this machine.

Needs PyTorch: pip install "fivefold[train]".
"""

import fivefold as ff


def main() -> None:
    for layout in ("dp=2,tp=2,zero=3", "pp=2,schedule=zb-h1,microbatches=4"):
        result = ff.verify(layout, steps=2)
        print(f"{layout}: {'holds' if result.ok else 'FAILS'}")
    print(result)  # what `fivefold verify` shows, of the last one


# Ranks are processes. Linux forks them; elsewhere they import this file, so the call must stand below this line.
if __name__ == "__main__":
    main()
