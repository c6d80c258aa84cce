// A board of cells on a canvas: ranks, or nodes of ranks. One of them is chosen by pointer or arrow keys; its groups are lit.
import { colour, inkOn, painting } from "../lib/canvas.js";
import * as colours from "../lib/colours.js";

const FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";

/** board(width => ({ cells, frames, texts, height, find }), look, { label, testid, onChoose(cell), words(cell) })
 *
 * A cell has x, y, size, rank, text, sub and `at`, its place along each axis; `find(rank)` is the index of a rank's cell.
 * `look` is shared by all boards of the view: { axis, sizes, chosen, groups, wire }. */
export function board(arrange, look, { label, testid, onChoose, onEnter }) {
  let drawn = null, hovered = -1;
  const picture = painting((context, width) => {
    drawn = arrange(width);
    if (drawn) paint(context, drawn, look, hovered);
  }, { height: width => arrange(width)?.height || 0, tabindex: 0, role: "application", "aria-roledescription": "map of ranks", "aria-label": `${label}; arrow keys go from cell to cell`, "data-testid": testid });
  const { canvas } = picture;
  canvas.classList.add("board");
  const at = event => drawn ? drawn.cells.findIndex(cell => event.offsetX >= cell.x && event.offsetX < cell.x + cell.size && event.offsetY >= cell.y && event.offsetY < cell.y + cell.size) : -1;
  const go = index => { if (index >= 0) onChoose(drawn.cells[index]); };
  canvas.addEventListener("pointermove", event => {
    const now = at(event);
    if (now === hovered) return;
    hovered = now;
    go(now);
    picture.update();
  });
  canvas.addEventListener("pointerleave", () => { hovered = -1; picture.update(); });
  canvas.addEventListener("click", event => { const now = at(event); if (now >= 0 && onEnter) onEnter(drawn.cells[now]); });
  canvas.addEventListener("keydown", event => {
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (!drawn || !look.chosen) return;
    const now = drawn.find(look.chosen.part.rank);
    if (event.key === "Enter" && onEnter && now >= 0) onEnter(drawn.cells[now]);
    if (!way) return;
    event.preventDefault();
    go(now < 0 ? 0 : nextCell(drawn.cells, now, way));
  });
  return { element: picture.element, update: picture.update };
}

/** The nearest cell in a direction; the cell itself where there is none. */
function nextCell(cells, now, [dx, dy]) {
  const here = cells[now];
  let best = now, least = Infinity;
  cells.forEach((cell, index) => {
    const along = dx * (cell.x - here.x) + dy * (cell.y - here.y), aside = Math.abs(dy * (cell.x - here.x)) + Math.abs(dx * (cell.y - here.y));
    if (along > 0.5 && along + 3 * aside < least) { least = along + 3 * aside; best = index; }
  });
  return best;
}

function paint(context, { cells, frames, texts, find }, look, hovered) {
  context.textBaseline = "middle";
  for (const frame of frames) {
    context.fillStyle = colour("var(--track)");
    context.beginPath();
    context.roundRect(frame.x, frame.y, frame.w, frame.h, 8);
    context.fill();
  }
  for (const text of texts) {
    context.font = `${text.bold ? "600 " : ""}${text.size || 12}px ${FONT}`;
    context.fillStyle = colour("var(--dim)");
    context.textAlign = text.align || "left";
    context.fillText(text.text, text.x, text.y, text.most);
  }
  const lit = new Map();
  for (const [axis, ranks] of Object.entries(look.groups || {})) {
    for (const rank of ranks) { const index = find(rank); if (index >= 0 && !lit.has(index)) lit.set(index, axis); }
  }
  const own = look.chosen ? find(look.chosen.part.rank) : -1;
  cells.forEach((cell, index) => {
    const seam = cell.size > 24 ? 5 : cell.size > 9 ? 2 : 0.6, size = cell.size - seam, x = cell.x + seam / 2, y = cell.y + seam / 2;
    const full = colours.shade(look.axis, cell.at[look.axis] ?? 0, look.sizes[look.axis] || 1);
    const paper = lit.size && !lit.has(index) && index !== own ? `color-mix(in srgb, ${full} 38%, var(--track))` : full;  // and ink that can be read on it
    context.fillStyle = colour(paper);
    context.beginPath();
    if (cell.size > 14) context.roundRect(x, y, size, size, Math.min(7, size / 5));
    else context.rect(x, y, size, size);
    context.fill();
    if (cell.size >= 26) {
      context.fillStyle = inkOn(paper);
      context.textAlign = "center";
      const high = Math.min(17, cell.size * 0.34, 1.3 * (size - 2) / cell.text.length);  // a digit is about 0.65 wide, and a ring needs room
      context.font = `650 ${high}px ${FONT}`;
      if (high >= 7) context.fillText(cell.text, x + size / 2, y + size * (cell.sub && cell.size >= 44 ? 0.4 : 0.52));
      if (cell.sub && cell.size >= 44) {
        context.font = `${Math.min(12, cell.size * 0.19)}px ${FONT}`;
        context.fillText(cell.sub, x + size / 2, y + size * 0.72, size - 4);
      }
    }
  });
  if (look.wire) wires(context, cells, find, look.wire);
  for (const [index, axis] of lit) if (index !== own) ring(context, cells[index], colour(colours.axis(axis)), cells[index].size > 20 ? 3.5 : 2);
  if (own >= 0) ring(context, cells[own], colour("var(--ink)"), cells[own].size > 20 ? 4 : 2.5);
  if (hovered >= 0 && hovered !== own && cells[hovered]) ring(context, cells[hovered], colour("var(--dim)"), 1.5);
}

function ring(context, cell, ink, wide) {
  context.strokeStyle = ink;
  context.lineWidth = wide;
  context.beginPath();
  const inset = cell.size > 14 ? wide / 2 : 0.5;
  if (cell.size > 14) context.roundRect(cell.x + inset, cell.y + inset, cell.size - 2 * inset, cell.size - 2 * inset, Math.min(8, cell.size / 5));
  else context.rect(cell.x + inset, cell.y + inset, cell.size - 2 * inset, cell.size - 2 * inset);
  context.stroke();
}

/** A collective on its way: every group as a ring of lines, that of the chosen rank in front, with parcels that travel. */
function wires(context, cells, find, { axis, kind, groups, own, phase }) {
  const ink = colour(colours.axis(axis));
  const travel = (ranks, front) => {
    const spots = [];
    for (const rank of ranks) { const index = find(rank); if (index >= 0 && index !== spots.at(-1)) spots.push(index); }
    if (spots.length < 2) return;
    const size = cells[0].size, low = size >= 44 ? 0.86 : 0.5;  // below a cell's text
    const points = spots.map(index => [cells[index].x + size / 2, cells[index].y + low * size]);
    const hops = points.slice(0, -1).map((point, at) => [point, points[at + 1]]);
    if (kind !== "send" && points.length > 2) hops.push([points.at(-1), points[0]]);
    context.strokeStyle = ink;
    context.globalAlpha = front ? 0.95 : 0.35;
    context.lineWidth = front ? 3 : 1.5;
    const bow = ([a, b]) => [(a[0] + b[0]) / 2 + Math.min(0.5 * size, 0.15 * Math.abs(b[1] - a[1])), (a[1] + b[1]) / 2 + Math.min(0.5 * size, 0.12 * Math.abs(b[0] - a[0]))];
    for (const hop of hops) {
      context.beginPath();
      context.moveTo(...hop[0]);
      context.quadraticCurveTo(...bow(hop), ...hop[1]);
      context.stroke();
    }
    if (phase === null) return;
    for (const hop of hops) {
      const [a, c, b] = [hop[0], bow(hop), hop[1]], t = phase, u = 1 - t;
      const [x, y] = [0, 1].map(k => u * u * a[k] + 2 * u * t * c[k] + t * t * b[k]);
      context.globalAlpha = front ? 1 : 0.5;
      context.fillStyle = colour("var(--card)");
      context.lineWidth = front ? 3 : 1.5;
      context.beginPath();
      context.arc(x, y, front ? 5 : 3, 0, 7);
      context.fill();
      context.stroke();
    }
  };
  for (const group of groups) travel(group, false);
  if (own) travel(own, true);
  context.globalAlpha = 1;
}
