// All schedules for the same numbers, small beside each other on one scale of time, the quickest first.
import { colour, painting } from "../lib/canvas.js";
import * as colours from "../lib/colours.js";
import { card, element } from "../lib/dom.js";
import * as format from "../lib/format.js";

const CUT = 1.5;  // times the quickest: what takes longer goes on outside its picture

/** Every rank as [kind, chunk, start, end]: of a small picture, or of a whole one. */
function lanesOf(row, fine) {
  const unit = row.makespan / fine;
  return row.lanes.map(lane => Array.from(lane.kinds, (kind, at) => [kind, lane.chunks[at], unit * lane.ends[2 * at], unit * lane.ends[2 * at + 1]]));
}
const whole = ({ lanes, chunk }) => lanes.map(lane => lane.map(one => [one.length > 5 ? "P" : one[0][0], chunk[one[1]], one[3], one[4]]));

export function drawEvery({ onTake, live }) {
  const grid = element("div", { class: "schedules", "data-testid": "every" });
  const refused = element("ul", { class: "dim small", "data-testid": "every-refused" }), about = element("span", { class: "dim small", "aria-live": "polite" });
  let rows = [], extra = null, marked = "", fine = 1;

  function small(row, longest) {
    const lanes = row.whole ? whole(row.whole) : lanesOf(row, fine), chunks = row.chunks;
    const one = painting((context, width, high) => {
      const thick = high / lanes.length, scale = width / longest;
      context.fillStyle = colour("var(--track)");
      context.fillRect(0, 0, Math.min(width, row.makespan * scale), high);
      lanes.forEach((lane, rank) => {
        const y = rank * thick, line = Math.max(1, thick - (thick > 4 ? 1 : 0.4));
        for (const [kind, chunk, start, end] of lane) {
          if (start >= longest) break;
          const x = start * scale, wide = Math.max(0.6, (end - start) * scale - ((end - start) * scale > 3 ? 0.6 : 0));
          if (kind === "P") {
            context.fillStyle = colour(colours.chunk("F", chunk, chunks));
            context.fillRect(x, y, wide, line / 2);
            context.fillStyle = colour(colours.chunk("B", chunk, chunks));
            context.fillRect(x, y + line / 2, wide, line / 2);
          } else {
            context.fillStyle = colour(colours.chunk(kind, chunk, chunks));
            context.fillRect(x, y, wide, line);
          }
        }
      });
    }, { height: () => 84, "aria-hidden": "true" });
    const peak = Math.max(...row.peak_activations), cut = row.makespan > longest * 1.001;
    const box = element("button", { type: "button", class: "schedule", "data-testid": `take-${row.schedule}`, "aria-pressed": String(row.schedule === marked), disabled: !live && row.schedule !== marked, onClick: () => onTake(row.schedule) },
      element("span", { class: "name" }, row.schedule), element("span", { class: "right", "data-testid": `makespan-${row.schedule}` }, format.time(row.makespan)), one.element,
      element("span", { class: "about" }, `bubble ${format.percent(row.bubble_makespan)} · peak\u00a0${format.time(peak)}\u00a0A${cut ? " · goes\u00a0on\u00a0→" : ""}`));
    box.dataset.name = row.schedule;
    return box;
  }

  function draw() {
    const all = [...rows, ...(extra ? [extra] : [])].filter(row => row.makespan !== undefined).sort((a, b) => a.makespan - b.makespan);
    if (!all.length) return;
    const longest = Math.max(...all.map(row => row.makespan).filter(one => one <= CUT * all[0].makespan));
    grid.replaceChildren(...all.map(row => small(row, longest)));
    refused.replaceChildren(...[...rows, ...(extra ? [extra] : [])].filter(row => row.refused).map(row => element("li", {}, element("strong", {}, row.schedule), ` is refused: ${row.refused}`)));
    about.textContent = `${all[0].schedule} is the quickest: ${format.time(all[0].makespan)}`;
    grid.classList.remove("busy");
  }

  const shown = card("All schedules, the quickest first", { aside: about, "data-testid": "every-card" }, grid, refused);
  return {
    element: shown,
    wait() { grid.classList.add("busy"); rows = []; extra = null; },
    show(answer) { if (answer.these) shown.querySelector("h2").textContent = "These schedules, the quickest first"; rows = answer.schedules; fine = answer.fine; draw(); },
    add({ schedule, drawn, refused: why }) { extra = drawn ? { ...drawn.figures, whole: drawn } : { schedule, refused: why }; if (rows.length) draw(); },
    mark(name) { marked = name; for (const box of grid.children) box.setAttribute("aria-pressed", String(box.dataset.name === name)); },
    fail(error) { about.textContent = error.message; grid.classList.remove("busy"); },
  };
}
