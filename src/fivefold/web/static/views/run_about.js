// What a run is and what happened to it: its figures, events, experts, job and environment.
import { readable } from "../lib/canvas.js";
import { slider } from "../lib/controls.js";
import { card, element, layoutText, shape } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { responsive, swatch } from "../lib/plot.js";
import { table } from "../lib/table.js";
import { tip } from "../lib/tooltip.js";
import { SIGNS, signOf } from "./run_curves.js";

const last = list => list[list.length - 1];
const known = (value, write) => value === null || value === undefined ? "—" : write(value);
export const rate = value => value ? value.toExponential(2) : "0";
const clock = seconds => new Date(seconds * 1e3).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** A line for each run that is shown: where it is now. */
export const latest = (runs, colour) => table(["run", ">step", ">loss", ">held out", ">learning rate", ">gradient norm", ">tokens/s", ">MFU", ">memory", ">damaged lines"], runs.map((run, at) => {
  const c = run.columns;
  return [[swatch(colour(at)), run.name], c.step.length ? `${format.count(last(c.step))}${run.job.train?.steps ? ` of ${format.count(run.job.train.steps)}` : ""}` : "—", known(last(c.loss), one => one.toFixed(4)), known(last(run.evaluations)?.[1], one => one.toFixed(4)),
    known(last(c.lr), rate), known(last(c.grad_norm), format.digits3), known(last(c.tokens_per_second), one => format.count(Math.round(one))), known(last(c.mfu), format.percent), known(last(c.memory), format.bytes), format.count(run.damaged)];
}), { testid: "latest", records: true, caption: runs.some(run => run.columns.mfu.some(one => one !== null)) ? null : "MFU: the peak rate of these devices is not known, so that no utilisation is computed." });

/** What of a run's files is not shown. */
export const notRead = runs => runs.flatMap(run => run.left_out.map(one => element("p", { class: "dim small", "data-testid": "left-out" }, runs.length > 1 ? `${run.name}: ${one}` : one)));

export function eventTable(runs, colour) {
  const every = runs.flatMap((run, at) => run.events.map(one => ({ ...one, run: run.name, at })));
  if (!every.length) return element("p", { class: "dim" }, "Nothing is written down: a run that a launcher starts keeps logs, and checkpoints are listed when there are any.");
  const line = (...parts) => element("span", { class: "line" }, parts);
  const rows = every.map(one => [line(signOf(one.kind), (SIGNS[one.kind] || SIGNS.note).name), ...(runs.length > 1 ? [line(swatch(colour(one.at)), one.run)] : []), one.step === null ? "" : format.count(one.step), one.time ? line(clock(one.time)) : "", one.bytes ? `${format.bytes(one.bytes)} in ${one.text}` : one.text]);
  return table(["event", ...(runs.length > 1 ? ["run"] : []), ">step", "when", "what"], rows, { testid: "events", records: true });
}

/** Tokens of each layer and expert at a step, against the mean of the layer. */
export function drawLoad() {
  let run = null, at = 0;
  const said = element("p", { class: "dim small", "data-testid": "load-said" });
  const moving = slider({ name: "load-step", label: "Step", hint: "steps that log lines are printed of", onInput: value => { at = run.loads.findIndex(one => one.step === value); show(); } });
  const picture = responsive(width => run && heat(width, run.loads[at].tokens), { "data-testid": "load-plot" });
  const whole = card("Load of the experts, by layer", { hidden: true, "data-testid": "load-card", aside: element("span", { class: "dim small" }, "tokens of an expert, times the mean of its layer") }, picture.element, moving.element, said);
  function show() {
    const { step, tokens } = run.loads[at], loads = tokens.map(layer => { const sum = layer.reduce((a, b) => a + b, 0) || 1; return layer.map(one => one * layer.length / sum); });
    const flat = loads.flat(), most = Math.max(...flat), layer = loads.findIndex(one => one.includes(most));
    moving.set(run.loads.map(one => one.step), step);
    said.textContent = `${run.name}, step ${step}: the fullest is expert ${loads[layer].indexOf(most)} of layer ${layer} with ${most.toFixed(2)} times the mean, the emptiest has ${Math.min(...flat).toFixed(2)}.`;
    picture.update();
  }
  return {
    element: whole,
    show(found) {
      const mine = found.find(one => one.loads.length), follows = !run || run.name !== mine?.name || at === run.loads.length - 1;
      whole.hidden = !mine;
      run = mine || null;
      if (!run) return;
      at = follows ? run.loads.length - 1 : Math.min(at, run.loads.length - 1);
      show();
    },
  };
}

/** Blue below the mean, red above: half of it, and twice, are the ends. */
function shade(times) {
  const far = Math.max(-1, Math.min(1, Math.log2(Math.max(times, 1e-6))));
  return `color-mix(in srgb, #eef1f5, ${far < 0 ? "#2166ac" : "#d55e00"} ${Math.round(Math.abs(far) * 100)}%)`;
}
function heat(width, tokens) {
  const left = 66, count = Math.max(...tokens.map(layer => layer.length)), wide = (width - left - 4) / count, tall = Math.max(6, Math.min(30, 260 / tokens.length)), every = Math.ceil(22 / wide), named = Math.ceil(14 / tall);
  const drawn = tokens.flatMap((layer, row) => {
    const mean = layer.reduce((sum, one) => sum + one, 0) / layer.length || 1, y = 4 + row * tall;
    return [row % named ? null : shape("text", { x: left - 8, y: y + tall / 2 + 4, class: "tick", "text-anchor": "end" }, `layer ${row}`), ...layer.flatMap((one, column) => {
      const times = one / mean, x = left + column * wide;
      return [tip(shape("rect", { x, y, width: Math.max(0.5, wide - (wide > 6 ? 2 : 0)), height: tall - (tall > 8 ? 2 : 0), rx: 3, fill: shade(times) }), () => [`layer ${row}, expert ${column}`, `${format.count(one)} tokens, ${times.toFixed(2)} times the mean`]),
        wide > 36 && tall > 16 ? readable(shape("text", { x: x + (wide - 2) / 2, y: y + tall / 2 + 3, "text-anchor": "middle", class: "cellnumber" }, times.toFixed(2)), shade(times)) : null];
    })];
  });
  const foot = 4 + tokens.length * tall;
  return shape("svg", { width, height: foot + 34, role: "img", "aria-label": "tokens by layer and expert" }, drawn.filter(Boolean),
    Array.from({ length: count }, (_, at) => at % every ? null : shape("text", { x: left + (at + 0.5) * wide, y: foot + 13, class: "tick", "text-anchor": "middle" }, at)), shape("text", { x: width - 4, y: foot + 29, class: "tick", "text-anchor": "end" }, "expert"));
}

const flat = (found, before = "") => Object.entries(found || {}).flatMap(([key, value]) => value && typeof value === "object" && !Array.isArray(value) ? flat(value, `${before}${key}.`) : [[`${before}${key}`, Array.isArray(value) ? value.join(",") : String(value)]]);

/** Jobs and environments; of several runs, what differs comes first. */
export function aboutTable(runs) {
  const tables = runs.map(run => new Map([...flat(run.job), ...flat(run.environment, "environment.")])), keys = [...new Set(tables.flatMap(one => [...one.keys()]))];
  const differ = keys.filter(key => new Set(tables.map(one => one.get(key) ?? "")).size > 1 && !key.startsWith("run.")), heads = ["setting", ...runs.map(run => run.name)];
  const row = key => [element("span", { class: "mono" }, key), ...tables.map(one => element("span", { class: "mono wraps" }, one.get(key) ?? "—"))];
  const facts = runs.length === 1 ? keys.filter(key => /^(environment\.|model\.name|train\.(steps|batch|dtype)|data\.seq|optimizer\.(name|lr|schedule))/.test(key)) : differ;
  return element("div", { class: "stack" },
    runs.map(run => element("p", {}, element("strong", {}, run.name), " ", element("span", { class: "dim" }, run.directory), " ", run.layout && layoutText(run.layout))),
    facts.length ? table(heads, facts.map(row), { testid: "about", records: runs.length > 1 && "named", caption: runs.length > 1 ? "What differs" : "In short" }) : element("p", { class: "dim" }, runs.length > 1 ? "Their jobs and environments are alike." : "It has no job.toml that can be read."),
    keys.length ? element("details", {}, element("summary", {}, `All ${keys.length} settings and facts`), table(heads, keys.map(row), { testid: "about-all", records: runs.length > 1 && "named" })) : "");
}
