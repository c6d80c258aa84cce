"""Draw the pictures of docs/learn:  python tools/learn_pictures.py

Each is a scene that follows from the code that the chapter explains: bytes from `cost/model_state.py`, shares from
`layout/context_split.py`, schedules from `schedules/`, seconds from the planner. One file serves light and dark pages:
its colours follow the reader's, by a style that knows the dark counterpart of each.
"""

from pathlib import Path

from fivefold.cost.model_state import FIVEFOLD_ACCOUNTING
from fivefold.layout.context_split import zigzag_share
from fivefold.layout.sharding import chunk
from fivefold.planner.explain import CAUSE_NAMES
from fivefold.planner.pictures import TIMES
from fivefold.planner.plan import simulate
from fivefold.render.paint import to_svg
from fivefold.render.scene import (
    BLUE,
    COLOURS,
    DARK,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    SUBTITLE,
    Frame,
    Line,
    Mark,
    Rect,
    Scene,
    TextMark,
    hexed,
    mix,
    rgb,
    text_on,
)
from fivefold.schedules.result import draw

ROOT = Path(__file__).parent.parent
WIDE, EDGE, SMALL, LABEL = 960.0, 28.0, 13.0, 15.0


def adaptive(svg: str) -> str:
    """The picture, dark where the reader's pages are."""
    rules = "".join(f'[fill="{a}"]{{fill:{b}}}[stroke="{a}"]{{stroke:{b}}}' for a, b in DARK.items())
    start = svg.index(">") + 1
    return f"{svg[:start]}<style>@media (prefers-color-scheme:dark){{{rules}}}</style>{svg[start:]}"


def sheet(title: str, height: float) -> Scene:
    return Scene(WIDE, height, title, [TextMark(EDGE, 30, title, SUBTITLE, bold=True)])


def say(scene: Scene, x: float, y: float, text: str, size: float = SMALL, **look: object) -> None:
    scene.shapes.append(TextMark(x, y, text, size, **look))  # type: ignore[arg-type]


def box(scene: Scene, x: float, y: float, wide: float, high: float, text: str, fill: str, size: float = SMALL) -> None:
    """A filled rectangle with its name in the middle."""
    scene.shapes.append(Rect(x, y, wide, high, fill))
    ink = INK if fill in DARK else text_on(rgb(fill))
    scene.shapes.append(TextMark(x + wide / 2, y + high / 2, text, size, "middle", ink))


def arrow(scene: Scene, x1: float, y1: float, x2: float, y2: float, stroke: str = GREY) -> None:
    """A line with a dot where it ends."""
    scene.shapes += [Line(x1, y1, x2, y2, stroke, 1.5), Mark(x2, y2, 3.5, stroke)]


def pale(colour: str) -> str:
    return hexed(mix(rgb(colour), (255, 255, 255), 0.45))


# ---- one scene for each chapter -------------------------------------------------------------------------------------


def memory() -> Scene:
    """Bytes of a parameter, by ZeRO stage over 64 ranks."""
    ranks, left, per_byte = 64, 190.0, 36.0
    scene = sheet("Bytes a parameter takes on a rank: bfloat16, AdamW, 64 data-parallel ranks", 300)
    for row, stage in enumerate(range(4)):
        state = FIVEFOLD_ACCOUNTING.state(1.0, 1 / ranks, stage, ranks)
        y, x = 56 + 44 * row, left
        say(scene, left - 14, y + 15, f"ZeRO {stage}" if stage else "replicated (ZeRO 0)", LABEL, anchor="end")
        for size, colour in zip(state, (BLUE, ORANGE, GREEN), strict=True):
            wide = size * per_byte
            if wide >= 40:
                box(scene, x, y, wide - 1, 30, f"{size:g}", colour, LABEL)
            else:
                scene.shapes.append(Rect(x, y, max(wide - 1, 2), 30, colour))
            x += max(wide, 3)
        say(scene, x + 8, y + 15, f"{state.total:.4g}", LABEL, bold=True)
    names = ("weights", BLUE), ("gradients, added up in float32", ORANGE), ("float32 master and two moments", GREEN)
    for x, (name, colour) in zip((left, left + 110, left + 360), names, strict=True):
        scene.shapes.append(Rect(x, 248, 14, 14, colour))
        say(scene, x + 22, 255, name, LABEL)
    return scene


def data_parallel() -> Scene:
    """Backward and buckets side by side, for ZeRO 1 and ZeRO 3."""
    scene = sheet("One microbatch of four layers on one rank: what travels while what is computed", 376)
    step, left = 94.0, 140.0

    def lane(y: float, name: str, boxes: list[tuple[float, float, str, str]]) -> None:
        say(scene, left - 12, y + 15, name, anchor="end")
        scene.shapes.append(Rect(left, y, 8.1 * step, 30, FAINT))
        for start, length, text, colour in boxes:
            box(scene, left + start * step, y, length * step - 2, 30, text, colour)

    say(scene, EDGE, 62, "ZeRO 0 to 2: gradients leave by the bucket, in the order in which they are made", LABEL)
    half = 0.5
    forward = [(half * at, half, f"F{at}", BLUE) for at in range(4)]
    backward = [(2.0 + at, 1.0, f"B{3 - at}", SKY) for at in range(4)]
    lane(78, "compute", forward + backward)
    lane(114, "network", [(3.0 + at, 0.8, f"reduce {3 - at}", ORANGE) for at in range(4)])
    say(scene, left + 6.9 * step, 129, "nothing hides it", SMALL, fill=GREY)
    say(scene, EDGE, 196, "ZeRO 3: weights come before each pass and go after it", LABEL)
    lane(212, "compute", [(0.4 + start, length, text, colour) for start, length, text, colour in forward + backward])
    gathers = [(0.4 * at, 0.39, f"g{at}", GREEN) for at in range(4)]
    gathers += [(1.9 + at, 0.39, f"g{3 - at}", GREEN) for at in range(4)]
    lane(248, "all-gather", gathers)
    lane(284, "reduce-scatter", [(3.4 + at, 0.8, f"reduce {3 - at}", ORANGE) for at in range(4)])
    note = "F, B: a layer's forward and backward pass; g: gather of a layer's weights; not to scale"
    say(scene, left, 344, note, fill=GREY)
    return scene


def tensor() -> Scene:
    """The two matrices of an MLP, cut by columns and by rows."""
    scene = sheet("An MLP on two tp ranks: the first matrix by columns, the second by rows, one sum", 330)
    for rank, colour in enumerate((BLUE, ORANGE)):
        y = 70 + 118 * rank
        say(scene, EDGE, y + 40, f"rank {rank}", LABEL, bold=True)
        box(scene, 110, y, 110, 80, "X, whole", FAINT, LABEL)
        say(scene, 240, y + 40, "x", LABEL, anchor="middle")
        scene.shapes.append(Frame(262, y, 130, 80, PALE))
        box(scene, 262 + 65 * rank, y, 65, 80, f"W1[:, {rank}]", colour)
        say(scene, 412, y + 40, "=", LABEL, anchor="middle")
        box(scene, 434, y, 66, 80, f"Y{rank}", pale(colour), LABEL)
        say(scene, 520, y + 40, "x", LABEL, anchor="middle")
        scene.shapes.append(Frame(542, y, 110, 80, PALE))
        box(scene, 542, y + 40 * rank, 110, 40, f"W2[{rank}, :]", colour)
        say(scene, 672, y + 40, "=", LABEL, anchor="middle")
        box(scene, 694, y, 96, 80, f"Z{rank}, a part", pale(colour))
        arrow(scene, 794, y + 40, 832, 169 - 20 + 40 * rank)
    box(scene, 836, 129, 104, 80, "Z0 + Z1", GREEN, LABEL)
    say(scene, 888, 226, "all-reduce", SMALL, anchor="middle", fill=GREY)
    say(scene, 467, 296, "activation: each its own", SMALL, anchor="middle", fill=GREY)
    say(scene, 165, 296, "backward: sum of dX", SMALL, anchor="middle", fill=GREY)
    return scene


def sequence() -> Scene:
    """What each of four tp ranks holds along a block, with and without sp."""
    scene = sheet("Half a block on four ranks: what each of them holds of the tokens", 330)
    parts = [("norm", 0), ("heads of attention", 1), ("residual", 0)]
    for row, (name, sharded) in enumerate((("tp", False), ("tp with sp", True))):
        top = 62 + 132 * row
        say(scene, EDGE, top + 44, name, LABEL, bold=True)
        for at, (part, inner) in enumerate(parts):
            x = 150 + 280 * at
            say(scene, x + 80, top - 2, part, anchor="middle")
            for rank in range(4):
                colour = COLOURS[rank]
                if inner:
                    box(scene, x + 40 * rank, top + 10, 39, 68, f"h{rank}", colour)
                elif sharded:
                    box(scene, x, top + 10 + 17 * rank, 160, 16, f"rank {rank}: 1/4 of the tokens", pale(colour), 11)
                elif not rank:
                    box(scene, x, top + 10, 160, 68, "all tokens, on every rank", FAINT)
        for at, text in enumerate(("all-gather", "reduce-scatter") if sharded else ("copy", "all-reduce")):
            x = 312 + 280 * at
            arrow(scene, x + 4, top + 44, x + 112, top + 44)
            say(scene, x + 58, top + 30, text, SMALL, anchor="middle", fill=GREY)
    note = "An all-reduce is a reduce-scatter and an all-gather: the same bytes, sent in two places."
    say(scene, 150, 312, note, fill=GREY)
    return scene


def context() -> Scene:
    """Whose queries see which keys: contiguous shares, and the zigzag."""
    ranks, cells, size, seq = 4, 8, 34.0, 8
    scene = sheet("Causal scores of eight pieces of a sequence on four ranks", 400)
    contiguous = [[chunk(seq, ranks, rank)] for rank in range(ranks)]
    zigzag = [zigzag_share(seq, ranks, rank) for rank in range(ranks)]
    for left, name, shares in ((120.0, "contiguous", contiguous), (560.0, "zigzag", zigzag)):
        say(scene, left + cells * size / 2, 62, name, LABEL, anchor="middle", bold=True)
        owner = {place: rank for rank, pieces in enumerate(shares) for piece in pieces for place in piece}
        counts = [0.0] * ranks
        for query in range(cells):
            rank = owner[query]
            y = 78 + size * query
            say(scene, left - 10, y + size / 2, f"rank {rank}", anchor="end")
            for key in range(query + 1):
                scene.shapes.append(Rect(left + size * key, y, size - 1, size - 1, COLOURS[rank]))
                counts[rank] += 0.5 if key == query else 1.0
        said = ", ".join(f"rank {rank}: {count:g}" for rank, count in enumerate(counts))
        say(scene, left + cells * size / 2, 370, f"tiles of {said}", anchor="middle", fill=GREY)
    return scene


def experts() -> Scene:
    """Tokens of two ranks, each to two experts, of which each rank has two."""
    scene = sheet("Two ranks, four experts, two of them for each token: dispatch, compute, combine", 350)
    chosen = [[(0, 2), (1, 3), (0, 1)], [(2, 3), (0, 3), (1, 2)]]
    for rank in range(2):
        top = 64 + 134 * rank
        say(scene, EDGE, top + 52, f"rank {rank}", LABEL, bold=True)
        for number, pair in enumerate(chosen[rank]):
            y = top + 36 * number
            box(scene, 110, y, 96, 30, f"token {3 * rank + number}", FAINT)
            box(scene, 780, y, 96, 30, f"token {3 * rank + number}", FAINT)
            for expert in pair:
                middle = 64 + 134 * (expert // 2) + 52 * (expert % 2) + 22
                arrow(scene, 206, y + 15, 416, middle, COLOURS[expert])
                arrow(scene, 564, middle, 776, y + 15, COLOURS[expert])
        for local in range(2):
            expert = 2 * rank + local
            box(scene, 420, top + 52 * local, 140, 44, f"expert {expert}", COLOURS[expert], LABEL)
    for x, text in ((311, "all-to-all"), (490, "grouped matmuls"), (670, "all-to-all, weighted sum")):
        say(scene, x, 332, text, SMALL, anchor="middle", fill=GREY)
    return scene


def order() -> Scene:
    """Which axis stands where among the ranks, and what it sends how often."""
    scene = sheet("How often an axis communicates decides where its ranks stand", 300)
    rows = [
        ("tp, sp", "several times a layer", "must stay on NVLink", RED),
        ("ep", "twice a layer of experts", "NVLink, or a fast network", PURPLE),
        ("cp", "once a layer, hidden by attention", "NVLink or a network", ORANGE),
        ("pp", "once a stage and microbatch", "any network", SKY),
        ("dp, ZeRO 1", "once a step, hidden by backward", "any network", BLUE),
        ("ZeRO 3", "three times a layer and microbatch", "NVLink, or few microbatches", GREEN),
    ]
    say(scene, EDGE, 62, "axis", fill=GREY)
    say(scene, 190, 62, "a rank communicates", fill=GREY)
    say(scene, 560, 62, "over", fill=GREY)
    for row, (axis, often, link, colour) in enumerate(rows):
        y = 78 + 36 * row
        box(scene, EDGE, y, 130, 28, axis, colour, LABEL)
        say(scene, 190, y + 14, often, LABEL)
        say(scene, 560, y + 14, link, LABEL)
    return scene


# Layouts of llama3-70b on 16 nodes, from the first thing that one tries to what is chosen.
TRIED = (
    "dp=16,tp=8,zero=1,sp,microbatches=32",
    "dp=16,tp=8,zero=1,sp,microbatches=32,recompute=full",
    "dp=8,tp=16,zero=1,sp,microbatches=64",
    "dp=8,tp=8,pp=2,zero=1,sp,microbatches=64",
    "dp=4,tp=8,pp=4,zero=1,sp,microbatches=128",
    "dp=8,tp=4,pp=4,zero=1,sp,microbatches=64,recompute=selective",
    "dp=128,zero=3,microbatches=2,recompute=full",
)


def choose() -> Scene:
    """The layouts of the chapter: a step's seconds by cause, and the memory of the fullest rank."""
    scene = sheet("llama3-70b on 16x8xH100, 512 sequences of 8,192 tokens: seconds of a step", 512)
    shown: dict[str, str] = {}
    for row, layout in enumerate(TRIED):
        option = simulate("llama3-70b", layout, "16x8xH100", batch=512).option
        y, x = 52 + 54 * row, EDGE
        say(scene, EDGE, y + 8, layout)
        for cause, seconds in option.estimate.causes.items():
            wide = 13.0 * seconds
            if seconds >= 0.05:
                scene.shapes.append(Rect(x, y + 18, max(wide - 1, 1), 24, TIMES[cause]))
                shown[CAUSE_NAMES[cause]] = TIMES[cause]
            x += wide
        fits = f"{option.footprint.total / 1e9:.1f} GB" + ("" if option.fits else ", does not fit")
        say(scene, x + 8, y + 30, f"{option.seconds:.1f} s", LABEL, bold=True)
        say(scene, x + 66, y + 30, fits, fill=GREY if option.fits else RED)
    for at, (name, colour) in enumerate(shown.items()):
        x, y = EDGE + 236 * (at % 4), 446 + 26 * (at // 4)
        scene.shapes.append(Rect(x, y, 14, 14, colour))
        say(scene, x + 22, y + 7, name)
    return scene


def pipeline() -> str:
    """Three schedules on one time scale."""
    return draw("1f1b", "zb-h1", "zb-v", pp=4, microbatches=8).svg()


SCENES = {
    "index": order,
    "memory": memory,
    "data-parallel": data_parallel,
    "tensor": tensor,
    "sequence": sequence,
    "context": context,
    "experts": experts,
    "choose": choose,
}


def pictures() -> dict[Path, str]:
    """By file."""
    drawn = {name: to_svg(scene()) for name, scene in SCENES.items()} | {"pipeline": pipeline()}
    return {ROOT / f"docs/pictures/learn-{name}.svg": adaptive(svg) for name, svg in drawn.items()}


if __name__ == "__main__":
    for path, svg in pictures().items():
        path.write_text(svg)
        print(path.relative_to(ROOT))
