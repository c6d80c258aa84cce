// Pictures in SVG, drawn at the width that they have: responsive(box, width => svg) draws again when that changes.
import { element, shape } from "./dom.js";
import { tip } from "./tooltip.js";

/** A box whose picture fits its width. `update()` draws again. */
export function responsive(draw, attributes = {}) {
  const box = element("div", { class: "plot", ...attributes });
  let width = 0;
  const update = () => {
    const drawn = width ? draw(width) : null;  // null: there is nothing to draw yet
    if (drawn) box.replaceChildren(drawn);
  };
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now && now !== width) { width = now; update(); }
  }).observe(box);
  return { element: box, update };
}

/** Round numbers from 0 to `most`, about `wanted` of them. */
export function ticks(most, wanted = 5) {
  if (!(most > 0)) return [0];
  const rough = most / wanted, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(one => one * size).find(one => one >= rough * 0.999);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, at) => at * step);
}

/** Horizontal stacked bars under one axis.
 *
 * rows: [{ label, parts: [{ name, value, colour }], note }]; marks: [{ value, label }] are limits across all rows.
 * `write` writes a value of the axis, `describe(row, part)` the lines of a tooltip.
 */
export function stackedBars(width, { rows, marks = [], write, describe, label, most: given, height = 0, left: wanted }) {
  const total = row => row.parts.reduce((sum, part) => sum + Math.max(0, part.value), 0);
  const most = given || Math.max(...rows.map(total), ...marks.map(mark => mark.value)) * 1.02 || 1;
  const longest = Math.max(0, ...rows.map(row => (row.label || "").length));
  const left = wanted ?? (longest ? Math.min(130, 10 + 7 * longest) : 0);
  const right = rows.some(row => row.note) ? 70 : marks.length ? 48 : 14, foot = 24;
  const x = value => left + (width - left - right) * value / most;
  const wide = text => 6.6 * text.length;
  const crowded = marks.length > 1 && x(marks[0].value) - 4 < wide(marks[0].label);  // the lower mark's name has no room on its left
  const top = marks.length ? crowded ? 40 : 26 : 4;
  const line = height || Math.max(3, Math.min(64, Math.floor(260 / rows.length)));
  const gap = line > 40 ? 10 : line > 8 ? 4 : line > 4 ? 1 : 0;
  const bottom = top + rows.length * line;
  const every = Math.ceil(14 / line);  // labels that would touch are left out
  const drawn = [];
  for (const tick of ticks(most, Math.max(2, Math.floor(width / 110)))) {
    drawn.push(shape("line", { x1: x(tick), x2: x(tick), y1: top, y2: bottom, class: "grid" }));
    drawn.push(shape("text", { x: x(tick), y: bottom + 16, class: "tick", "text-anchor": tick ? "middle" : "start" }, tick ? write(tick).replace(/\.0+(?=\D|$)/, "") : "0"));
  }
  rows.forEach((row, at) => {
    const y = top + at * line + gap / 2, thick = line - gap;
    let start = 0;
    if (row.label && at % every === 0) drawn.push(shape("text", { x: left - 8, y: y + thick / 2 + 4, class: "rowlabel", "text-anchor": "end" }, row.label));
    for (const part of row.parts) {
      if (part.value <= 0) continue;
      const from = x(start), to = x(start + part.value);
      start += part.value;
      const piece = shape("rect", { x: from, y, width: Math.max(0.4, to - from - (to - from > 3 && line > 4 ? 1 : 0)), height: thick, fill: part.colour });
      drawn.push(describe ? tip(piece, () => describe(row, part)) : piece);
    }
    if (row.note) drawn.push(shape("text", { x: x(start) + 6, y: y + thick / 2 + 4, class: "note" }, row.note));
  });
  marks.forEach((mark, at) => {
    // Of two the lower is named on its left, so that names do not meet; where there is no room, a line above the other.
    const above = crowded && at === 0, left = !above && (marks.length > 1 && !crowded ? at === 0 : x(mark.value) + 4 + wide(mark.label) > width);
    drawn.push(shape("line", { x1: x(mark.value), x2: x(mark.value), y1: top - (above ? 20 : 6), y2: bottom, class: mark.hard ? "mark hard" : "mark" }));
    drawn.push(shape("text", { x: x(mark.value) + (left ? -4 : 4), y: top - (above ? 24 : 10), class: "marklabel", "text-anchor": left ? "end" : "start" }, mark.label));
  });
  return shape("svg", { width, height: bottom + foot, role: "img", "aria-label": label }, drawn);
}

/** A value between the ends of its range, on a scale from 0 to `most`. */
export function interval(width, { value, ends, most, label, colour = "var(--accent)" }) {
  const x = at => 2 + (width - 4) * Math.min(1, at / most);
  return shape("svg", { width, height: 14, role: "img", "aria-label": label },
    shape("rect", { x: 2, y: 5, width: width - 4, height: 4, rx: 2, class: "track" }),
    ends && shape("rect", { x: x(ends[0]), y: 3, width: Math.max(2, x(ends[1]) - x(ends[0])), height: 8, rx: 4, fill: colour, opacity: 0.35 }),
    shape("rect", { x: x(value) - 1.5, y: 1, width: 3, height: 12, rx: 1.5, fill: colour }));
}

/** Curves over one x axis: series [{ name, points: [[x, y], ...], colour }]; tooltips name the nearest point. */
export function curves(width, { series, height = 220, writeX = String, writeY = String, label, labelX = "", labelY = "", low = null, high = null }) {
  const points = series.flatMap(one => one.points).filter(([, y]) => Number.isFinite(y));
  const left = 54, right = 12, top = 18, bottom = height - 34;
  const xs = points.map(point => point[0]), ys = points.map(point => point[1]);
  const [x0, x1] = [Math.min(...xs, Infinity), Math.max(...xs, -Infinity)];
  const [y0, y1] = [low ?? Math.min(...ys), high ?? Math.max(...ys)];
  const x = value => left + (width - left - right) * (x1 > x0 ? (value - x0) / (x1 - x0) : 0.5);
  const y = value => bottom - (bottom - top) * (y1 > y0 ? (value - y0) / (y1 - y0) : 0.5);
  if (!points.length) return shape("svg", { width, height, role: "img", "aria-label": `${label}: no points` });
  const marksX = ticks(x1 - x0, Math.max(2, Math.floor(width / 120))).map(one => one + x0);
  const marksY = ticks(y1 - y0, 4).map(one => one + y0);
  const lines = series.map(one => shape("polyline", { points: one.points.filter(([, v]) => Number.isFinite(v)).map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" "), fill: "none", stroke: one.colour, "stroke-width": 2, "stroke-linejoin": "round", "stroke-dasharray": one.dashed ? "5 4" : null }));
  const cursor = shape("line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden" });
  const area = shape("rect", { x: left, y: top, width: Math.max(0, width - left - right), height: bottom - top, fill: "transparent" });
  let at = x0;
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect();
    at = x0 + (x1 - x0) * (event.clientX - box.left) / Math.max(1, box.width);
    cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at)); cursor.setAttribute("visibility", "visible");
  });
  area.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
  tip(area, () => series.filter(one => one.points.length).map(one => {
    const near = one.points.reduce((best, point) => Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best);
    return `${one.name}: ${writeY(near[1])} at ${writeX(near[0])}`;
  }));
  return shape("svg", { width, height, role: "img", "aria-label": label },
    marksX.map(value => [shape("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, class: "grid" }), shape("text", { x: x(value), y: bottom + 15, class: "tick", "text-anchor": "middle" }, writeX(value))]),
    marksY.map(value => [shape("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }), shape("text", { x: left - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, writeY(value))]),
    labelX && shape("text", { x: (left + width - right) / 2, y: height - 3, class: "tick", "text-anchor": "middle" }, labelX),
    labelY && shape("text", { x: 2, y: 11, class: "tick" }, labelY),
    lines, cursor, area);
}

/** Squares of colour with names: legend([{ name, colour, text }]) */
export const legend = entries => element("ul", { class: "legend" }, entries.map(one => element("li", {}, swatch(one.colour), one.name, one.text && element("span", { class: "dim" }, ` ${one.text}`))));

export const swatch = colour => shape("svg", { width: 12, height: 12, class: "swatch", "aria-hidden": "true" }, shape("rect", { width: 12, height: 12, rx: 3, fill: colour }));
