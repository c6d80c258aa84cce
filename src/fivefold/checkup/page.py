"""A checkup's report as one page of HTML, without scripts or anything from the network, for screens and paper."""

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from typing import Any

from fivefold.checkup.calibration import Constant, amount_text, sentence_of
from fivefold.checkup.pictures import losses_picture, steps_picture
from fivefold.checkup.report import CheckupReport, PartReport
from fivefold.checkup.result import extras_table, setup_text, steps_table, verdict
from fivefold.machines.judge import flops_text, rate_text
from fivefold.render.blocks import Cell, Row, Table, mark, table_html
from fivefold.render.html import STYLE
from fivefold.render.paint import to_svg
from fivefold.render.scene import DARK, FAINT, GREY, INK, Scene

_MOST_ROWS = 32  # of a table
_LOOK = f"""
h1 {{ margin-bottom: .25rem; line-height: 1.2; }} h2 {{ margin: 2.5rem 0 .5rem; }}
.lead {{ color: {GREY}; margin-top: 0; }}
.verdict {{ padding: .75rem 1rem; border-radius: .5rem; font-weight: 600; background: #e3f4ec; color: #0b5a3e; }}
.verdict.bad {{ background: #fde8e0; color: #8a2c05; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem; padding: 0; }}
.cards li {{ list-style: none; padding: .75rem 1rem; border-radius: .5rem; background: {FAINT}; }}
.cards a {{ color: inherit; text-decoration: none; font-weight: 600; }} .cards span {{ display: block; color: {GREY}; }}
.cards a, .cards b {{ display: block; }}
.cards b {{ color: #0b7a53; }} .cards .bad b {{ color: #b8430b; }} .cards .none b {{ color: {GREY}; }}
figure {{ max-width: 34rem; }} pre {{ white-space: pre-wrap; overflow-wrap: anywhere; }}
pre {{ padding: .5rem .75rem; background: {FAINT}; border-radius: .5rem; font-size: .85rem; }}
li.bad, p.bad {{ color: #b8430b; }} th {{ vertical-align: bottom; }} td {{ vertical-align: top; }}
td:first-child {{ overflow-wrap: anywhere; }}
@media (max-width: 40rem) {{ th, td {{ padding: .2rem .4rem; font-size: .85rem; }} body {{ margin: 1rem auto; }} }}
@media (prefers-color-scheme: dark) {{
  .cards li, pre {{ background: {DARK[FAINT]}; }} .cards span, .lead {{ color: {DARK[GREY]}; }}
  .verdict {{ background: #123527; color: #b9ecd5; }} .verdict.bad {{ background: #40200f; color: #ffc9ae; }}
  .cards b {{ color: #58c79c; }} .cards .bad b, li.bad, p.bad {{ color: #ff9d6b; }} .cards {{ color: {DARK[INK]}; }}
}}
@media print {{ .cards li, pre {{ border: 1px solid #ccc; }} h2 {{ break-after: avoid; }} }}
"""
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style></head>
<body>
"""


def to_page(report: CheckupReport) -> str:
    """The whole page."""
    title = f"Checkup: {report.setup.get('device', 'unknown devices')}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(setup_text(report.setup))}; {escape(report.day)}</p>',
    ]
    parts.append(f'<p class="verdict{"" if report.ok else " bad"}">{escape(verdict(report).capitalize())}</p>')
    parts.append(f'<ul class="cards">{"".join(map(_card, report.parts))}</ul>')
    if report.corrections:
        parts += ["<h2>What to correct</h2>", _items(report.corrections, "ol")]
    for part in report.parts:
        if part.status != "left out":
            parts += _section(report, part)
    parts.append("<h2>How this was made</h2>")
    made = f"fivefold {report.fivefold}, {report.day}; {report.seconds / 60:.1f} of {report.minutes:g} minutes"
    parts.append(f"<p>{escape(made)}:</p><pre>{escape(report.command)}</pre>")
    parts.append(
        "<p>The JSON beside this page has all figures; <code>fivefold accuracy --data FILE.json</code> reads it.</p>"
    )
    return _HEAD.format(title=escape(title), style=STYLE + _LOOK) + "\n".join(parts) + "\n</body></html>\n"


def _card(part: PartReport) -> str:
    kind = "none" if part.status in ("left out", "not run") else "" if part.good else "bad"
    took = f"{part.seconds:.0f} s of {part.limit:.0f} s" if part.seconds else "-"
    return (
        f'<li class="{kind}"><a href="#{escape(part.name)}">{escape(part.title)}</a>'
        f"<b>{escape(part.status)}</b><span>{took}</span></li>"
    )


def _section(report: CheckupReport, part: PartReport) -> Iterator[str]:
    yield f'<h2 id="{escape(part.name)}">{escape(part.title)}</h2>'
    if part.findings:
        yield _items(part.findings, "ul", "bad")
    figures = [sentence_of(Constant(**figure)) for figure in part.data.get("figures", ())]  # which the table has
    if says := [sentence for sentence in part.says if sentence not in figures]:
        yield _items(says, "ul")
    tables = {"machines": _machines, "proofs": _proofs, "calibration": _calibration}
    if part.data and part.name in tables:
        for table in tables[part.name](part.data):
            yield _scrolling(table)
    if part.name == "lost-rank":
        yield from _figure(losses_picture(report))
        if said := part.data.get("said"):
            yield f"<p>What was said of it:</p><pre>{escape(chr(10).join(said))}</pre>"
    if part.name == "layouts" and report.runs:
        yield from _figure(steps_picture(report.runs))
        yield _scrolling(steps_table(report.runs))
        if extras := extras_table(report.runs):
            yield _scrolling(extras)


def _figure(scene: Scene | None) -> Iterator[str]:
    if scene is not None:
        for name, dark in (("light", False), ("dark", True)):
            yield f'<figure class="{name}">{to_svg(scene, dark=dark)}</figure>'


def _items(sentences: list[str], tag: str, style: str = "") -> str:
    of_class = f' class="{style}"' if style else ""
    return f"<{tag}>{''.join(f'<li{of_class}>{escape(sentence)}</li>' for sentence in sentences)}</{tag}>"


def _scrolling(table: Table) -> str:
    return f'<div class="scroll">{table_html(_filled(table))}</div>'


def _filled(table: Table) -> Table:
    """The table without columns in which no row says anything."""
    rows = list(table.cells)
    used = [index for index in range(len(table.heads)) if any(row[index].text not in ("", "-") for row in rows)]
    heads = [table.heads[index] for index in used]
    return replace(table, heads=heads, rows=[[row[index] for index in used] for row in rows], totals=())


def _machines(data: dict[str, Any]) -> Iterator[Table]:
    expected = data["expected"]["matmul"]
    rows: list[Row] = []
    for rank, plan in list(zip(data["ranks"], expected, strict=False))[:_MOST_ROWS]:
        gpu = rank.get("gpu") or {}
        state = f"{gpu['temperature']} C, {gpu['power']:.0f} W" if gpu else ""
        share = f"{rank['rate'] / plan:.0%}" if plan else "-"
        rows.append([str(rank["rank"]), str(rank["node"]), rank["device"], flops_text(rank["rate"]), share, state])
    more = len(data["ranks"]) - _MOST_ROWS
    caption = f"{more} more ranks are in the JSON" if more > 0 else ""
    yield Table([">rank", ">node", "device", ">matmuls", ">of plan", "state"], rows, caption=caption)
    links = [
        [axis, f"{1e6 * link['latency']:.0f} us", rate_text(link["reduce"]), rate_text(link["gather"]),
         rate_text(link["send"]) if link["send"] else "-",
         rate_text(data["expected"]["links"][axis]) if data["expected"]["links"].get(axis) else "-"]
        for axis, link in data["links"].items()
    ]  # fmt: skip
    if links:
        heads = ["axis", ">latency", ">all-reduce", ">all-gather", ">message", ">planner"]
        yield Table(heads, links, caption="bytes that a rank passes on, in the slowest group of each axis")


def _proofs(data: dict[str, Any]) -> Iterator[Table]:
    rows: list[Row] = []
    for proof in data["layouts"][:_MOST_ROWS]:
        error = "-" if proof["gradient_error"] is None else f"{proof['gradient_error']:.1e}"
        rows.append(
            [
                proof["layout"],
                proof["model"],
                error,
                f"{proof['bound']:.0e}" if proof["bound"] else "-",
                mark(proof["passed"]),
            ]
        )
    more = len(data["layouts"]) - _MOST_ROWS
    caption = (
        f"{more} more are in the JSON" if more > 0 else "gradients: the largest difference from one process, relative"
    )
    yield Table(["~layout", "model", ">gradients", ">allowed", ""], rows, caption=caption)


def _calibration(data: dict[str, Any]) -> Iterator[Table]:
    rows: list[Row] = []
    for figure in (Constant(**figure) for figure in data["figures"]):
        known = figure.catalogue is not None
        change = f"{100 * (figure.measured / figure.catalogue - 1):+.0f}%" if figure.catalogue else "-"
        there = amount_text(figure.catalogue, figure.unit) if known and figure.catalogue else "-"
        rows.append([figure.what, Cell(amount_text(figure.measured, figure.unit), "bold"), there, change])
    yield Table(["", ">measured", ">catalogue", ">change"], rows)
