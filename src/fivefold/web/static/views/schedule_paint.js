// Paints a schedule: the ranks' lanes, what an action waits for and what waits for it, and under them the memory.
import { colour, inkOn } from "../lib/canvas.js";
import * as colours from "../lib/colours.js";
import * as format from "../lib/format.js";
import { ticks } from "../lib/plot.js";

export const LEFT = 58, TOP = 6, RIGHT = 10, AXIS = 26, GAP = 30, MEMORY = 120, FOOT = 10;
export const laneHeight = p => Math.max(8, Math.min(38, Math.floor(380 / p)));
export const heightOf = p => TOP + p * laneHeight(p) + AXIS + GAP + MEMORY + FOOT;

/** What is at a point of the lanes: { rank, time }, or null. */
export function under(x, y, width, p, view) {
  const rank = Math.floor((y - TOP) / laneHeight(p));
  if (x < LEFT || x > width - RIGHT || rank < 0 || rank >= p) return null;
  return { rank, time: view.from + (view.to - view.from) * (x - LEFT) / (width - LEFT - RIGHT) };
}

export function paint(context, width, { drawn, asked }, view, chosen) {
  const p = drawn.lanes.length, high = laneHeight(p), end = width - RIGHT;
  const at = { x: time => LEFT + (end - LEFT) * (time - view.from) / (view.to - view.from), y: rank => TOP + rank * high, high: high - (high > 12 ? 2 : 1), end, scale: (end - LEFT) / (view.to - view.from) };
  const palette = paletteOf(drawn.figures.chunks);
  labels(context, p, high, asked, chosen);
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, end - LEFT, 4000);
  context.clip();
  drawn.lanes.forEach((lane, rank) => {
    context.globalAlpha = 1;
    context.fillStyle = colour("var(--track)");
    context.fillRect(LEFT, at.y(rank), Math.min(end, at.x(drawn.figures.makespan)) - LEFT, at.high);
    paintLane(context, drawn, lane, rank, at, view, chosen, palette);
  });
  if (chosen) lines(context, drawn, chosen, at);
  const bottom = TOP + p * high;
  axis(context, bottom, at, view);
  memory(context, drawn, bottom + AXIS + GAP, at, view, chosen);
  context.restore();
  scaleOfMemory(context, drawn, bottom + AXIS + GAP, chosen);
}

function labels(context, p, high, asked, chosen) {
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.ceil(13 / high);
  for (let rank = 0; rank < p; rank += 1) {
    const slow = asked.slow === rank;
    if (rank % every && !slow && chosen?.rank !== rank) continue;
    context.font = `${chosen?.rank === rank || slow ? "600 " : ""}${high < 12 ? 10 : 12}px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif`;
    context.fillStyle = colour(slow ? "var(--bad)" : "var(--ink)");
    context.fillText(slow ? `${rank} ×${asked.factor}` : p > 10 ? String(rank) : `rank ${rank}`, LEFT - 8, TOP + rank * high + high / 2);
  }
}

/** By kind and chunk: what an action is painted with, and the ink on it. Asked for thousands of times, looked up once. */
function paletteOf(chunks) {
  const each = Array.from({ length: chunks }, (_, chunk) => chunk);
  return Object.fromEntries([..."FBIWS"].map(kind => [kind, each.map(chunk => { const paper = colours.chunk(kind, chunk, chunks); return [colour(paper), inkOn(paper)]; })]));
}

function paintLane(context, drawn, lane, rank, at, view, chosen, palette) {
  const y = at.y(rank);
  context.textAlign = "center";
  const narrow = at.scale * Math.min(...lane.map(one => one[4] - one[3])), digits = String(drawn.figures.microbatches - 1).length;
  const fitting = Math.max(8, (narrow - 3) / (0.72 * digits));  // so that none of a lane's numbers is left out while others are not
  context.font = `600 ${Math.min(11.5, at.high - 3, fitting)}px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif`;
  lane.forEach((one, place) => {
    const [kind, stage, microbatch, start, stop, other, otherStage, otherMicrobatch] = one;
    if (stop < view.from || start > view.to) return;
    const x = at.x(start), wide = (stop - start) * at.scale, seam = wide > 4 ? 1 : wide > 1.5 ? 0.4 : 0;
    context.globalAlpha = !chosen || chosen.near.has(`${rank} ${place}`) ? 1 : 0.42;
    const thick = at.high / (other ? 2 : 1);
    const part = (name, of, number, half) => {
      const [paper, ink] = palette[name[0]][drawn.chunk[of]];
      context.fillStyle = paper;
      context.fillRect(x, y + half * thick, Math.max(0.5, wide - seam), thick);
      const text = wide > 40 && thick > 14 ? `${name}${number}` : String(number);
      if (thick < 10 || wide < 9 || x < LEFT - 6 || wide < context.measureText(text).width + 2.5) return;
      context.fillStyle = ink;
      context.fillText(text, x + (wide - seam) / 2, y + (half + 0.53) * thick);
    };
    part(kind, stage, microbatch, 0);
    if (other) part(other, otherStage, otherMicrobatch, 1);
  });
  context.globalAlpha = 1;
}

function lines(context, drawn, chosen, at) {
  const box = ([rank, place]) => ({ rank, start: drawn.lanes[rank][place][3], end: drawn.lanes[rank][place][4] });
  const self = box([chosen.rank, chosen.place]);
  const outline = (one, ink, wide) => {
    context.strokeStyle = ink;
    context.lineWidth = wide;
    context.strokeRect(at.x(one.start), at.y(one.rank), (one.end - one.start) * at.scale - 1, at.high);
  };
  const join = (from, to, ink, dashes) => {
    const [x1, y1, x2, y2] = [at.x(from.end) - 1, at.y(from.rank) + at.high / 2, at.x(to.start) + 1, at.y(to.rank) + at.high / 2];
    const bend = Math.max(14, Math.abs(x2 - x1) / 3);
    context.strokeStyle = context.fillStyle = ink;
    context.lineWidth = 2.5;
    context.setLineDash(dashes);
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    context.stroke();
    context.setLineDash([]);
    context.beginPath();
    context.moveTo(x2 + 1, y2);
    context.lineTo(x2 - 7, y2 - 4.5);
    context.lineTo(x2 - 7, y2 + 4.5);
    context.fill();
  };
  const before = colour("var(--bad)"), after = colour("var(--good)");
  for (const one of chosen.needs) { outline(box(one), before, 2.5); join(box(one), self, before, []); }
  for (const one of chosen.feeds) { outline(box(one), after, 2.5); join(self, box(one), after, [6, 4]); }
  if (chosen.place) outline(box([chosen.rank, chosen.place - 1]), before, 1.5);
  outline(self, colour("var(--ink)"), 3);
}

function axis(context, bottom, at, view) {
  context.textAlign = "center";
  context.textBaseline = "alphabetic";
  context.font = "11.5px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";
  const wanted = Math.max(2, Math.floor((at.end - LEFT) / 90)), step = ticks(view.to - view.from, wanted)[1] || 1;
  for (let tick = Math.ceil(view.from / step) * step; tick <= view.to + 1e-9; tick += step) {
    const x = at.x(tick);
    context.strokeStyle = colour("var(--rule)");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, bottom);
    context.lineTo(x, bottom + 5);
    context.moveTo(x, bottom + AXIS + GAP);
    context.lineTo(x, bottom + AXIS + GAP + MEMORY);
    context.stroke();
    context.fillStyle = colour("var(--dim)");
    context.textAlign = x < LEFT + 12 ? "left" : x > at.end - 12 ? "right" : "center";
    context.fillText(format.time(Math.round(tick * 1e6) / 1e6), x, bottom + 18);
  }
}

/** The live activations of every rank as steps; that of one rank stands out. */
function memory(context, drawn, top, at, view, chosen) {
  const peaks = drawn.figures.peak_activations, most = Math.max(...peaks);
  const front = chosen ? chosen.rank : peaks.indexOf(most), y = live => top + MEMORY * (1 - live / (most * 1.05));
  const trace = steps => {
    context.beginPath();
    context.moveTo(at.x(0), y(0));
    let last = 0;
    for (const [time, live] of steps) {
      context.lineTo(at.x(time), y(last));
      context.lineTo(at.x(time), y(live));
      last = live;
    }
    context.lineTo(at.x(drawn.figures.makespan), y(last));
  };
  context.lineWidth = 1;
  drawn.memory.forEach((steps, rank) => {
    if (rank === front) return;
    context.globalAlpha = 0.45;
    context.strokeStyle = colour("var(--dim)");
    trace(steps);
    context.stroke();
  });
  trace(drawn.memory[front]);
  context.globalAlpha = 1;
  context.strokeStyle = colour("var(--accent)");
  context.lineWidth = 2.2;
  context.stroke();
  context.lineTo(at.x(drawn.figures.makespan), y(0));
  context.globalAlpha = 0.16;
  context.fillStyle = colour("var(--accent)");
  context.fill();
  context.globalAlpha = 1;
}

function scaleOfMemory(context, drawn, top, chosen) {
  const peaks = drawn.figures.peak_activations, most = Math.max(...peaks), front = chosen ? chosen.rank : peaks.indexOf(most);
  context.fillStyle = colour("var(--dim)");
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.font = "11.5px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";
  for (const tick of ticks(most, 3)) context.fillText(format.time(tick), LEFT - 8, top + MEMORY * (1 - tick / (most * 1.05)));
  context.textAlign = "left";
  context.font = "600 12px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";
  context.fillStyle = colour("var(--ink)");
  context.fillText(`Activations held, in A: rank ${front}, peak ${format.time(peaks[front])}`, 4, top - 14);
}
