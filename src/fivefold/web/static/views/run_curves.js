// Curves of runs over their steps: raw values faint, smoothed ones over them, and the events of a run's life as marks.
import { shape } from "../lib/dom.js";
import { tip } from "../lib/tooltip.js";

export const SIGNS = {
  checkpoint: { name: "checkpoint", colour: "var(--green)", d: "M-4,-4h8v8h-8z" },
  restart: { name: "restart", colour: "var(--blue)", d: "M-5,4L0,-5L5,4z" },
  start: { name: "start", colour: "var(--blue)", d: "M-4,-5L5,0L-4,5z" },
  fault: { name: "fault", colour: "var(--red)", d: "M-5,-3L-3,-5L0,-2L3,-5L5,-3L2,0L5,3L3,5L0,2L-3,5L-5,3L-2,0z" },
  aside: { name: "checkpoint set aside", colour: "var(--red)", d: "M-4,-4h8v8h-8z" },
  stop: { name: "stop", colour: "var(--orange)", d: "M-5,-2L-2,-5H2L5,-2V2L2,5H-2L-5,2z" },
  end: { name: "end", colour: "var(--slate)", d: "M0,-5L5,0L0,5L-5,0z" },
  note: { name: "note", colour: "var(--orange)", d: "M-4,0a4,4 0 1 0 8,0a4,4 0 1 0 -8,0z" },
};
export const signOf = kind => {
  const { d, colour } = SIGNS[kind] || SIGNS.note;
  return shape("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", class: "swatch", "aria-hidden": "true" }, shape("path", { d, fill: colour }));
};

/** An exponential mean, in which the first values do not weigh more than others. */
export function smoothed(values, share) {
  if (!share) return values;
  let mean = 0, weight = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return value;
    mean = share * mean + (1 - share) * value;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

/** Round numbers between two ends. */
function between(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted), size = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 2.5, 5, 10].map(one => one * size).find(one => one >= rough * 0.999) || 1, from = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - from + 1) }, (_, at) => (from + at) * step);
}
const decades = (low, high) => Array.from({ length: 24 }, (_, at) => 10 ** (at - 12)).flatMap(one => [one, 2 * one, 5 * one]).filter(one => one >= low && one <= high);

/** The points of a line in pieces, between which there is no value. */
function pieces(xs, ys, x, y, width) {
  const found = [[]];
  for (let at = 0; at < xs.length; at++) {
    if (Number.isFinite(ys[at])) found[found.length - 1].push([x(xs[at]), y(ys[at])]);
    else if (found[found.length - 1].length) found.push([]);
  }
  return found.filter(piece => piece.length).map(piece => thin(piece.length > 1 ? piece : [piece[0], piece[0]], width));
}

/** No more points than the picture can show: of each pixel the least and the greatest. */
function thin(points, width) {
  if (points.length <= 3 * width) return points;
  const kept = [];
  for (let at = 0; at < points.length;) {
    const pixel = Math.floor(points[at][0]);
    let low = points[at], high = points[at];
    for (; at < points.length && Math.floor(points[at][0]) === pixel; at++) {
      if (points[at][1] < low[1]) low = points[at];
      if (points[at][1] > high[1]) high = points[at];
    }
    kept.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
  }
  return kept;
}
const joined = points => points.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" ");

/** chart(width, { series: [{ name, colour, xs, ys, dots: [[x, y]] }], write, label, share, log, zero, events, until, height })
 * share smooths; log is a logarithmic scale; zero has the axis begin at 0; events: [{ kind, step, text, run }]. */
export function chart(width, { series, write, label, share = 0, log = false, zero = false, events = [], until = 0, height = 190 }) {
  const left = 58, right = 10, top = events.length ? 24 : 8, bottom = height - 34, found = series.map(one => ({ ...one, soft: smoothed(one.ys, share) }));
  const all = found.flatMap(one => [...one.ys, ...(one.dots || []).map(dot => dot[1])]).filter(value => Number.isFinite(value) && (!log || value > 0));
  const steps = found.flatMap(one => one.xs.length ? [one.xs[0], one.xs[one.xs.length - 1]] : []);
  if (!all.length) return shape("svg", { width, height: 40, role: "img", "aria-label": `${label}: nothing yet` }, shape("text", { x: 2, y: 22, class: "tick" }, "nothing yet"));
  const x0 = Math.min(...steps, 0), x1 = Math.max(...steps, until, 1);
  let least = Infinity, most = -Infinity;
  for (const value of all) { if (value < least) least = value; if (value > most) most = value; }
  const room = (most - least || Math.abs(most) || 1) * 0.06;
  const [y0, y1] = log ? [least / 1.15, most * 1.15] : [zero ? 0 : least - room, most + room];
  const x = value => left + (width - left - right) * (value - x0) / (x1 - x0);
  const level = log ? Math.log10 : value => value;
  const y = value => bottom - (bottom - top) * (level(value) - level(y0)) / (level(y1) - level(y0) || 1);
  const marksX = between(x0, x1, Math.max(2, Math.floor(width / 130)));
  let marksY = log ? decades(y0, y1) : between(y0, y1, Math.max(2, Math.floor((bottom - top) / 36)));
  if (log && marksY.length > 6) marksY = marksY.filter(one => Number.isInteger(Number(Math.log10(one).toFixed(9))));
  const line = (ys, one, extra) => pieces(one.xs, ys, x, y, width).map(points => shape("polyline", { points: joined(points), fill: "none", stroke: one.colour, "stroke-linejoin": "round", "stroke-linecap": "round", ...extra }));
  const cursor = shape("line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden" });
  const area = shape("rect", { x: left, y: top, width: Math.max(0, width - left - right), height: bottom - top, fill: "transparent" });
  let at = x0;
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect();
    at = x0 + (x1 - x0) * (event.clientX - box.left) / Math.max(1, box.width);
    cursor.setAttribute("x1", x(at)); cursor.setAttribute("x2", x(at)); cursor.setAttribute("visibility", "visible");
  });
  area.addEventListener("pointerleave", () => cursor.setAttribute("visibility", "hidden"));
  tip(area, () => found.filter(one => one.xs.length).map(one => {
    let near = 0;
    for (let index = 1; index < one.xs.length; index++) if (Math.abs(one.xs[index] - at) < Math.abs(one.xs[near] - at)) near = index;
    return `${one.name}: ${Number.isFinite(one.ys[near]) ? write(one.ys[near]) : "—"} at step ${one.xs[near]}`;
  }));
  const marks = events.filter(one => one.step !== null).map(one => {
    const sign = SIGNS[one.kind] || SIGNS.note;
    const drawn = shape("path", { d: sign.d, transform: `translate(${x(one.step).toFixed(1)},${one.kind === "checkpoint" || one.kind === "aside" ? 16 : 6})`, fill: sign.colour, stroke: "var(--card)", "stroke-width": 0.8 });
    return [shape("line", { x1: x(one.step), x2: x(one.step), y1: 22, y2: bottom, stroke: sign.colour, "stroke-opacity": one.kind === "checkpoint" ? 0.16 : 0.55, "stroke-width": 1.2 }), tip(drawn, () => [`${one.run}: ${sign.name}, step ${one.step}`, one.text])];
  });
  return shape("svg", { width, height, role: "img", "aria-label": label },
    marksX.map(value => [shape("line", { x1: x(value), x2: x(value), y1: top, y2: bottom, class: "grid" }), shape("text", { x: x(value), y: bottom + 15, class: "tick", "text-anchor": "middle" }, value)]),
    marksY.map(value => [shape("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }), shape("text", { x: left - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, write(value))]),
    shape("text", { x: width - right, y: bottom + 30, class: "tick", "text-anchor": "end" }, "step"),
    marks.map(pair => pair[0]),
    share ? found.map(one => line(one.ys, one, { "stroke-width": 1, "stroke-opacity": 0.28 })) : null,
    found.map(one => line(one.soft, one, { "stroke-width": 2.2 })),
    found.flatMap(one => (one.dots || []).map(([a, b]) => shape("circle", { cx: x(a), cy: y(b), r: 4.2, fill: "var(--card)", stroke: one.colour, "stroke-width": 2.2 }))),
    cursor, area, marks.map(pair => pair[1]));
}
