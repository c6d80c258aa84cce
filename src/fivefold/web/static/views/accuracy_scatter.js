// Predicted against measured: a mark for each run, the diagonal, and bands that say how far off a prediction is.
import * as colours from "../lib/colours.js";
import { element, shape } from "../lib/dom.js";
import * as format from "../lib/format.js";

const SHADES = ["var(--band-near)", "var(--band-far)"];  // of the narrow band, and of the wide one
const MARKS = [
  (x, y, r) => `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0z`,
  (x, y, r) => `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`,
  (x, y, r) => `M${x},${y - 1.25 * r}L${x + 1.15 * r},${y + 0.85 * r}H${x - 1.15 * r}z`,
  (x, y, r) => `M${x},${y - 1.35 * r}L${x + 1.35 * r},${y}L${x},${y + 1.35 * r}L${x - 1.35 * r},${y}z`,
];

/** A line of the table has a colour and a shape; models with experts have hollow marks. */
export const lookOf = (at, experts) => ({ colour: colours.nth(at % 6), mark: MARKS[Math.floor(at / 6) % MARKS.length], hollow: experts });

const paint = look => look.hollow ? { fill: "none", stroke: look.colour, "stroke-width": 1.7 } : { fill: look.colour, "fill-opacity": 0.62 };

export const sign = look => shape("svg", { width: 14, height: 14, class: "swatch", "aria-hidden": "true" }, shape("path", { d: look.mark(7, 7, 4.6), ...paint(look), "fill-opacity": look.hollow ? null : 1 }));

export const bandsLegend = bands => element("ul", { class: "legend" },
  bands.map((band, at) => element("li", {}, shape("svg", { width: 20, height: 12, class: "swatch", "aria-hidden": "true" }, shape("rect", { width: 20, height: 12, rx: 3, fill: SHADES[at] })), `within ${format.percent(band, 0)}`)),
  element("li", {}, shape("svg", { width: 20, height: 12, class: "swatch", "aria-hidden": "true" }, shape("line", { x1: 0, x2: 20, y1: 6, y2: 6, class: "diagonal" })), "no error"),
  element("li", {}, sign(lookOf(0, false)), "dense"), element("li", {}, sign(lookOf(0, true)), "with experts"));

/** Ends of both axes, which all pictures of these rows share. */
export function span(rows) {
  const values = rows.flatMap(row => [row.measured_seconds, row.predicted_seconds, row.null_seconds]).filter(one => one > 0);
  return values.length ? [Math.min(...values) * 0.75, Math.max(...values) * 1.35] : [0.1, 10];
}

const FAR = 2.6;  // times the measured time: marks beyond it stand at the edge

/** scatter(width, { rows, of: row => seconds, ends, bands, looks, at, label, onPick, ratio }): `at` is the row that is marked. */
export function scatter(width, { rows, faint, of, ends, bands, looks, at, label, onPick, ratio = false }) {
  const left = 46, right = 8, top = 8, foot = 38, size = Math.min(width - left - right, 470), bottom = top + size;
  const [low, high] = ends.map(Math.log10), place = value => size * (Math.log10(value) - low) / (high - low);
  const x = value => left + place(value), y = value => bottom - place(value), far = Math.log(FAR);
  const over = share => top + size / 2 - size / 2 * Math.max(-1, Math.min(1, Math.log(share) / far));  // of predicted over measured
  const height = row => ratio ? over(of(row) / row.measured_seconds) : y(of(row));
  const decades = Array.from({ length: 12 }, (_, n) => 10 ** (n - 5)).filter(one => one >= ends[0] && one <= ends[1]);
  const write = value => value >= 1 ? `${value} s` : `${Math.round(value * 1e3)} ms`;
  const band = (share, shade) => {
    if (ratio) return shape("rect", { x: left, y: over(1 + share), width: size, height: over(1 - share) - over(1 + share), fill: shade });
    const [from, to] = ends, more = 1 + share, less = 1 - share;
    const points = [[from, from], [from, from * more], [to / more, to], [to, to], [to, to * less], [from / less, from]];
    return shape("polygon", { points: points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" "), fill: shade });
  };
  const marks = several => [...Map.groupBy(several, row => row.group)].map(([group, mine]) => {
    const look = looks.get(group);
    return shape("path", { d: mine.map(row => look.mark(Number(x(row.measured_seconds).toFixed(1)), Number(height(row).toFixed(1)), 3.5)).join(""), ...paint(look), class: "marks" });
  });
  const ring = at && of(at) ? shape("circle", { cx: x(at.measured_seconds), cy: height(at), r: 8, class: "ring" }) : null;
  const area = shape("rect", { x: left, y: top, width: size, height: size, fill: "transparent" });
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect(), px = event.clientX - box.left + left, py = event.clientY - box.top + top;
    let best = null, least = 24 ** 2;
    for (const row of rows) {
      const away = (x(row.measured_seconds) - px) ** 2 + (height(row) - py) ** 2;
      if (away < least) { least = away; best = row; }
    }
    if (best) onPick(best);
  });
  return shape("svg", { width, height: bottom + foot, role: "img", "aria-label": label },
    [...bands].map((share, n) => band(share, SHADES[n])).reverse(),
    decades.map(value => [
      shape("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, class: "grid" }), shape("text", { x: x(value), y: bottom + 15, class: "tick", "text-anchor": "middle" }, write(value)),
      ratio ? null : [shape("line", { x1: left, x2: left + size, y1: y(value), y2: y(value), class: "grid" }), shape("text", { x: left - 5, y: y(value) + 4, class: "tick", "text-anchor": "end" }, write(value))]]),
    ratio ? [0.5, 0.75, 1, 1.25, 2].map(share => [shape("line", { x1: left, x2: left + size, y1: over(share), y2: over(share), class: share === 1 ? "diagonal" : "grid" }), shape("text", { x: left - 5, y: over(share) + 4, class: "tick", "text-anchor": "end" }, `×${share}`)])
      : shape("line", { x1: x(ends[0]), y1: y(ends[0]), x2: x(ends[1]), y2: y(ends[1]), class: "diagonal" }),
    shape("text", { x: left + size / 2, y: bottom + 33, class: "tick", "text-anchor": "middle" }, "measured, a step"),
    shape("text", { x: left + 6, y: top + 14, class: "tick" }, ratio ? "predicted over measured" : "predicted, a step"),
    shape("g", { opacity: 0.13 }, marks(faint.filter(row => of(row)))), marks(rows.filter(row => of(row))), ring,
    ratio ? bands.map(share => shape("text", { x: left + 5, y: over(1 + share) + 13, class: "tick halo" }, `within ${format.percent(share, 0)}`)) : null, area);
}
