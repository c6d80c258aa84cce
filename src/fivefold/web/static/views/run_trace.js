// A traced step: for each rank what it did over what the same schedule does on the simulator's clock, waits and messages.
import { readable } from "../lib/canvas.js";
import * as colours from "../lib/colours.js";
import { card, element, shape } from "../lib/dom.js";
import { select } from "../lib/controls.js";
import * as format from "../lib/format.js";
import { legend, responsive } from "../lib/plot.js";
import { table } from "../lib/table.js";
import { tip } from "../lib/tooltip.js";

const TALL = { measured: 24, simulated: 24, waits: 11, communication: 11 };
const PARTS = ["dispatch", "combine"];  // inside of actions
const DONE = { optimizer: "var(--slate)", dispatch: "var(--sky)", combine: "var(--red)", message: "var(--grey)" };
// Colours of actions are those of axes, too: what is along an axis is striped.
const along = kind => !(kind in DONE) && !["F", "B", "I", "W"].includes(kind);
const idOf = kind => `along-${String(kind).replace(/\W+/g, "-")}`;
const colourOf = kind => along(kind) ? `url(#${idOf(kind)})` : DONE[kind] || colours.action(kind);
const stripes = kind => shape("pattern", { id: idOf(kind), width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
  shape("rect", { width: 5, height: 5, fill: colours.axis(kind) }), shape("rect", { width: 1.8, height: 5, fill: "var(--card)" }));
const kindsOf = ranks => [...new Set(ranks.flatMap(rank => rank.lanes.flatMap(lane => lane.slices.map(one => one[3]))))];
const time = microseconds => format.seconds(microseconds / 1e6);

function lanesOf(rank) {
  const order = ["measured", "simulated", "waits", "communication"];
  return [...rank.lanes].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
}

export function lanesPicture(width, { ranks, microseconds }, zoom) {
  const left = 112, right = 10, whole = Math.max(width, left + right + (width - left - right) * zoom);
  const most = ranks.flatMap(rank => rank.lanes.flatMap(lane => lane.slices)).reduce((end, one) => Math.max(end, one[0] + one[1]), microseconds);
  const x = at => left + (whole - left - right) * at / most;
  const drawn = [], rough = most / (whole / 110), size = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].map(one => one * size).find(one => one >= rough);
  let y = 6;
  const body = [];
  for (const rank of ranks) {
    body.push(shape("text", { x: 2, y: y + 17, class: "note" }, rank.name.replace(/^rank (\d+)\s+/, "$1  ")));
    for (const lane of lanesOf(rank)) {
      const tall = TALL[lane.kind] || 11, thick = tall - 2;
      if (lane.kind !== "measured") body.push(shape("text", { x: left - 6, y: y + thick / 2 + 3.5, class: "tick lanename", "text-anchor": "end" }, lane.kind === "simulated" ? "simulated" : lane.name));
      for (const [start, length, name, kind] of lane.slices) {
        const part = PARTS.includes(kind), from = x(start), wide = Math.max(0.6, x(start + length) - from);
        const box = shape("rect", { x: from, y: part ? y + thick - 6 : y, width: Math.max(0.6, wide - (wide > 4 ? 0.8 : 0)), height: part ? 6 : thick, rx: wide > 6 && tall > 12 && !part ? 3 : 0, fill: colourOf(kind), "fill-opacity": lane.kind === "simulated" ? 0.38 : 1, stroke: lane.kind === "simulated" ? colourOf(kind) : null, "stroke-dasharray": lane.kind === "simulated" ? "3 2" : null });
        body.push(tip(box, () => [`${rank.name}: ${name}${lane.kind === "simulated" ? ", simulated" : ""}`, `${time(length)} from ${time(start)}`]));
        if (tall > 12 && wide > 8 + 6.5 * name.length && !part && kind !== "optimizer") body.push(readable(shape("text", { x: from + wide / 2, y: y + thick / 2 + (lane.kind === "measured" ? 2 : 4), "text-anchor": "middle", class: "slice" }, name), lane.kind === "simulated" ? "" : colourOf(kind)));
      }
      y += tall;
    }
    y += 8;
  }
  for (let at = 0; at <= most; at += step) drawn.push(shape("line", { x1: x(at), x2: x(at), y1: 2, y2: y, class: "grid" }), shape("text", { x: x(at), y: y + 14, class: "tick", "text-anchor": !at ? "start" : x(at) > whole - 30 ? "end" : "middle" }, time(at).replace(/\.0+(?=\D|$)/, "")));
  return shape("svg", { width: whole, height: y + 22, role: "img", "aria-label": `what ${ranks.length} ranks did in a step, measured and simulated` }, shape("defs", {}, kindsOf(ranks).filter(along).map(stripes)), drawn, body);
}

const PARTNAMES = [["step", "step"], ["compute", "compute"], ["exposed", "exposed"], ["bubble", "bubble"], ["optimizer", "optimizer"], ["other", "other"]];
function partsTable({ summary }) {
  if (!summary) return "";
  const piped = Math.max(summary.mean.bubble_predicted, summary.mean.bubble_measured) > 5e-4;
  const value = (one, name) => name === "exposed" ? Object.values(one.exposed).reduce((sum, each) => sum + each, 0) : one[name];
  const cells = (name, one) => [name, ...PARTNAMES.map(([key]) => format.seconds(value(one, key))), ...(piped ? [format.percent(one.bubble_measured), format.percent(one.bubble_predicted)] : [])];
  return table(["rank", ...PARTNAMES.map(([, name]) => `>${name}`), ...(piped ? [">bubble measured", ">bubble predicted"] : [])], summary.ranks.slice(0, 32).map(one => cells(`${one.rank}  ${one.place}`, one)),
    { testid: "trace-table", records: true, foot: cells("mean", summary.mean), caption: `Mean of ${summary.steps} traced steps. Exposed: it waited for a collective. Bubble: the pipeline ran, and the rank had nothing to compute.` });
}

export function drawTrace({ onStep, live }) {
  let now = null, zoom = 1;
  const said = element("p", { "data-testid": "trace-said" }), parts = element("div");
  const steps = select({ name: "trace-step", label: "Step", onInput: value => onStep(Number(value)) }), zooming = select({ name: "trace-zoom", label: "Zoom", onInput: value => { zoom = Number(value); picture.update(); } });
  const picture = responsive(width => now && element("div", { class: "scroll" }, lanesPicture(width, now, zoom)), { "data-testid": "trace-plot" });
  const whole = card("Where a step's time goes, measured over simulated", { aside: element("div", { class: "row" }, steps.element, zooming.element), "data-testid": "trace-card", hidden: true }, said, picture.element, element("div"), parts);
  return {
    element: whole,
    hide() { whole.hidden = true; },
    fail(error) { whole.hidden = false; now = null; said.textContent = error.message; picture.element.replaceChildren(); parts.replaceChildren(); },
    show(answer) {
      now = answer;
      whole.hidden = false;
      steps.set(answer.steps.map(one => ({ value: String(one), text: String(one) })), answer.step, { off: !live });
      zooming.set([1, 2, 4, 8, 16].map(one => ({ value: String(one), text: `×${one}` })), zoom);
      const both = answer.summary?.mean;
      said.textContent = `${answer.run}, step ${answer.step}: ${time(answer.microseconds)} with ${answer.layout || "one rank"}.` + (both && Math.max(both.bubble_predicted, both.bubble_measured) > 5e-4 ? ` Over ${answer.summary.steps} traced steps the bubble is ${format.percent(both.bubble_measured)} of the pipeline's time; ${answer.schedule} with the medians of these durations predicts ${format.percent(both.bubble_predicted)}.` : "") + (answer.left_out ? ` ${answer.left_out} more ranks are in the file.` : "") + (answer.slices_left_out ? ` ${answer.slices_left_out} more slices are in the file.` : "");
      picture.update();
      const kinds = kindsOf(answer.ranks).sort((a, b) => along(a) - along(b));
      const names = { F: "forward", B: "backward", I: "backward, input", W: "backward, weights", message: "waits for a message", optimizer: "optimizer", dispatch: "dispatch", combine: "combine" };
      whole.children[3].replaceChildren(legend(kinds.map(kind => ({ name: names[kind] || `along ${kind}`, colour: colourOf(kind) }))));
      parts.replaceChildren(partsTable(answer));
    },
  };
}
