// Where the cells of the boards stand: ranks in their nodes, nodes in a cluster, one node, one replica of the model.
import { count } from "../lib/format.js";

const LARGEST = 100, HIGHEST = 430;
const places = (at, index) => Object.fromEntries(Object.entries(at).map(([axis, all]) => [axis, all[index]]));
const said = (look, at) => look.axis ? `${look.axis} ${at[look.axis] ?? 0}` : "";

/** Every rank in its node. */
export function everyRank(map, look, width) {
  const { nodes, gpus } = map;
  let best = null;
  for (let across = 1; across <= nodes; across += 1) {
    for (const line of new Set([gpus, Math.ceil(gpus / 2), Math.ceil(gpus / 4)])) {
      const cell = Math.min(LARGEST, ((width - 8 * (across - 1)) / across - 12) / line), high = Math.ceil(nodes / across) * (Math.ceil(gpus / line) * cell + 40);
      if (cell > 0 && (!best || (high <= HIGHEST && (best.high > HIGHEST || cell > best.cell + 0.5 || (cell > best.cell - 0.5 && high < best.high))) || (high > HIGHEST && best.high > HIGHEST && high < best.high))) best = { across, line, cell, high };
    }
  }
  const { across, line, cell } = best, lines = Math.ceil(gpus / line), wide = line * cell + 12, high = lines * cell + 40, gap = across > 1 ? 8 : 0;
  const cells = map.cells.map((rank, index) => {
    const node = Math.floor(rank / gpus), within = rank % gpus, at = places(map.at, index);
    return { rank, at, size: cell, text: String(rank), sub: said(look, at),
      x: node % across * (wide + gap) + 6 + within % line * cell, y: Math.floor(node / across) * high + 26 + Math.floor(within / line) * cell };
  });
  const frames = Array.from({ length: nodes }, (_, node) => ({ x: node % across * (wide + gap), y: Math.floor(node / across) * high + 20, w: wide, h: lines * cell + 12 }));
  const texts = frames.map((frame, node) => ({ x: frame.x + 2, y: frame.y - 9, text: wide > 52 ? `node ${node}` : String(node), size: wide > 52 ? 12 : 10 }));
  return { cells, frames, texts, height: Math.ceil(nodes / across) * high, find: rank => rank };
}

/** Every node, as a cell. */
export function everyNode(map, look, width) {
  const { nodes, gpus } = map;
  let columns = 1;
  while (columns < nodes && (width / columns > 26 || (width / columns) * Math.ceil(nodes / columns) > HIGHEST)) columns += 1;
  for (let more = columns; more < 2 * columns; more += 1) if (nodes % more === 0) { columns = more; break; }
  const cell = width / columns, rows = Math.ceil(nodes / columns);
  const cells = map.cells.map((rank, node) => ({ rank, at: places(map.at, node), size: cell, text: String(node), x: node % columns * cell, y: Math.floor(node / columns) * cell }));
  const texts = [{ x: 0, y: rows * cell + 14, text: `a cell is a node of ${gpus} GPUs; ${columns} nodes a line, ${count(nodes)} in all` }];
  return { cells, frames: [], texts, height: rows * cell + 26, find: rank => Math.floor(rank / gpus) };
}

/** The ranks of one node, in one line or two. */
export function oneNode({ node }, look, width) {
  const gpus = node.ranks.length, line = gpus > 8 ? Math.ceil(gpus / 2) : gpus, cell = Math.min(LARGEST, (width - 12) / line), lines = Math.ceil(gpus / line);
  const cells = node.ranks.map((rank, index) => { const at = places(node.at, index); return { rank, at, size: cell, text: String(rank), sub: said(look, at), x: 6 + index % line * cell, y: 6 + Math.floor(index / line) * cell }; });
  return { cells, frames: [{ x: 0, y: 0, w: line * cell + 12, h: lines * cell + 12 }], texts: [], height: lines * cell + 14, find: rank => node.ranks.indexOf(rank) };
}

/** The ranks that hold the model once: a line for each pipeline rank. */
export function oneReplica({ replica }, look, width) {
  const { lines } = replica, many = lines[0].ranks.length, left = width < 500 ? 62 : 150;
  const cell = Math.min(52, (width - left) / many, Math.max(16, 460 / lines.length)), found = new Map(), cells = [], texts = [];
  lines.forEach((line, pp) => {
    const layers = line.layers.map(ends => ends.length ? (ends[0] === ends[1] ? `${ends[0]}` : `${ends[0]}–${ends[1]}`) : "none").join(", ");
    texts.push({ x: 0, y: pp * cell + cell / 2, text: left > 100 ? `pp ${pp} · layers ${layers}` : `pp ${pp}`, size: Math.min(12, Math.max(9, cell * 0.6)), most: left - 8 });
    line.ranks.forEach((rank, index) => {
      found.set(rank, cells.length);
      const at = places(line.at, index);
      cells.push({ rank, at, size: cell, text: String(rank), sub: said(look, at), x: left + index * cell, y: pp * cell });
    });
  });
  return { cells, frames: [], texts, height: lines.length * cell + 4, find: rank => found.get(rank) ?? -1 };
}
