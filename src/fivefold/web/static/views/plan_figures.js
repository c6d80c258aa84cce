// What a layout costs: four figures with their ranges, memory of every pipeline rank, time by cause, traffic by axis.
import { button } from "../lib/controls.js";
import * as colours from "../lib/colours.js";
import { breakable, card, element, layoutText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { interval, legend, responsive, stackedBars, swatch } from "../lib/plot.js";
import { table } from "../lib/table.js";

function figure(name, testid) {
  const value = element("span", { "data-testid": testid }), unit = element("span", { class: "unit" }), about = element("div", { class: "about", "data-testid": `${testid}-range` });
  let drawn = null;
  const scale = responsive(width => drawn && interval(width, drawn));
  return {
    element: element("div", { class: "figure" }, element("div", { class: "name" }, name), element("div", { class: "value" }, value, " ", unit), scale.element, about),
    show(text, measure, said, gauge) {
      value.textContent = text; unit.textContent = measure; about.textContent = said;
      drawn = gauge; scale.element.hidden = !gauge; scale.update();
    },
  };
}

export function drawFigures({ onTake }) {
  let now = null, best = null, waits = false;
  const dock = element("div", { class: "dock", "aria-hidden": "true" });
  const step = figure("Step", "step"), rate = figure("Tokens per second and GPU", "rate"), mfu = figure("Model FLOPs utilisation", "mfu"), memory = figure("Memory of the most loaded rank", "memory");
  const verdict = element("div", { "aria-live": "polite", "data-testid": "verdict" });
  const bars = responsive(width => now?.figures && memoryBars(width, now), { "data-testid": "memory-plot" });
  const times = responsive(width => now?.figures && timeBar(width, now), { "data-testid": "time-plot" });
  const wires = responsive(width => now?.figures && trafficBars(width, now), { "data-testid": "traffic-plot" });
  const parts = element("div"), causes = element("div"), moved = element("div"), ranks = element("span", { class: "dim small" });
  const numbers = element("div", { class: "stack" },
    element("div", { class: "figures" }, step.element, rate.element, mfu.element, memory.element),
    card("Memory of each pipeline rank", { aside: ranks, "data-testid": "memory-card" }, element("div", { class: "side-by-side" }, bars.element, parts)),
    element("div", { class: "grid2" }, card("Time of a step, by cause", { "data-testid": "time-card" }, times.element, causes),
      card("What a rank sends in a step", { "data-testid": "traffic-card" }, wires.element, moved)));
  const whole = element("div", { class: "stack" }, verdict, dock, numbers);
  return {
    element: whole,
    because(difference) {
      const said = verdict.querySelector('[data-testid="against"]');
      if (said && difference && best && now.figures.layout !== best.layout) said.textContent = `Against the planner's choice it ${difference}.`;
    },
    against(other) {
      if (other === best) return;
      best = other;
      if (now?.figures) judge(verdict, now, onTake, best, waits);
    },
    /** `searching`: nobody has chosen this layout, and the planner's choice is on its way: there is nothing to judge. */
    show(payload, searching) {
      numbers.classList.toggle("busy", searching);
      now = payload;
      waits = searching;
      judge(verdict, payload, onTake, best, searching);
      numbers.hidden = dock.hidden = !payload.figures;
      if (!payload.figures) return;
      headline(payload, { step, rate, mfu, memory });
      dock.replaceChildren(...[format.seconds(payload.figures.step_seconds), ...(payload.figures.fits ? [`MFU ${format.percent(payload.figures.mfu)}`] : []), `${format.gigabytes(payload.figures.memory_bytes)} GB`].map(text => element("strong", {}, text)),
        searching ? element("span", { class: "dim" }, "searching …") : element("span", { class: payload.problems.length || !payload.figures.fits ? "bad" : "good" }, payload.problems.length ? "cannot run" : payload.figures.fits ? "fits" : "does not fit"));
      bars.update(); times.update(); wires.update();
      ranks.textContent = payload.shown.fields.pp > 1 ? `${payload.shown.fields.pp} pipeline ranks; the table is rank ${payload.figures.memory_rank}, the most loaded` : "all ranks are alike";
      parts.replaceChildren(memoryTable(payload.figures));
      causes.replaceChildren(timeTable(payload));
      moved.replaceChildren(trafficTable(payload));
    },
  };
}

const largest = parts => Object.entries(parts).reduce((most, one) => one[1] > most[1] ? one : most);

function compared(figures, best) {
  if (!best) return "";
  const change = figures.step_seconds / best.step_seconds - 1;
  if (best.layout === figures.layout) return "This is the planner's choice.";
  return Math.abs(change) < 0.0005 ? "It takes as long as the planner's choice." : `It is ${format.percent(Math.abs(change))} ${change > 0 ? "slower" : "faster"} than the planner's choice.`;
}

function judge(box, { question, problems, shown, changes, figures, causes, device_memory_bytes }, onTake, best, searching) {
  if (problems.length) {
    box.replaceChildren(element("div", { class: "notice bad", "data-testid": "problems" },
      element("strong", {}, "This cannot run. "), element("ul", {}, problems.map(one => element("li", {}, breakable(one)))),
      shown ? element("p", {}, "The figures below are of the nearest layout that is legal: ", layoutText(shown.text, { "data-testid": "nearest" }), ` (${changes.join(", ")})`,
        element("span", { "data-testid": "nearest-fits" }, figures.fits ? ", which fits. " : `, which does not fit either: it needs ${format.gigabytes(figures.memory_bytes)} GB on the most loaded rank, and a plan may fill ${format.gigabytes(figures.memory_limit_bytes)} of ${format.gigabytes(device_memory_bytes)} GB. `),
        button("Take it", { "data-testid": "take-nearest", onClick: () => onTake(shown.text) })) : element("p", {}, "Nothing near it is legal either.")));
    return;
  }
  if (searching) {
    box.replaceChildren(element("div", { class: "notice", "data-testid": "searching" }, element("strong", {}, `Searching for the best layout of ${question.model} on ${format.count(question.world)} GPUs … `),
      "It is shown as soon as it is found. Until then the figures are of where the search begins, ", layoutText(shown.text), ", which nobody has chosen; move a slider to choose one yourself."));
    return;
  }
  const used = figures.memory_bytes / device_memory_bytes, [part, size] = largest(figures.memory_by_component);
  const fits = figures.fits ? `It fits: ${format.gigabytes(figures.memory_bytes)} of ${format.gigabytes(device_memory_bytes)} GB on the most loaded rank, ${format.percent(used, 0)} of the device.`
    : `It does not fit: ${format.gigabytes(figures.memory_bytes)} GB on the most loaded rank, and a plan may fill ${format.gigabytes(figures.memory_limit_bytes)} of ${format.gigabytes(device_memory_bytes)} GB.`;
  const [cause, length] = largest({ ...figures.time_by_cause, gemm: 0, attention: 0 });
  box.replaceChildren(element("div", { class: figures.fits ? "notice good" : "notice bad" }, element("strong", { "data-testid": "fits" }, fits), " ",
    element("span", { "data-testid": "limits" }, `Largest in memory: ${part}, ${format.gigabytes(size)} GB. ` +
      (length > 0 ? `Beside matmuls and attention, most time goes to ${causes[cause]}, ${format.percent(length / figures.step_seconds)}.` : "")), " ",
    element("span", { "data-testid": "against" }, compared(figures, best))));
}

function headline({ figures, device_memory_bytes }, { step, rate, mfu, memory }) {
  const inWords = ends => ends ? `${format.percent(figures.range_share, 0)} range: ` : "no range: this device was not measured";
  const gauge = (value, ends, most, label) => ({ value, ends, most, label });
  const [number, unit] = format.seconds(figures.step_seconds).split(" ");
  step.show(number, unit, inWords(figures.step_seconds_range) + format.range(figures.step_seconds_range, format.seconds),
    gauge(figures.step_seconds, figures.step_seconds_range, 1.6 * figures.step_seconds, "range of the step's time"));
  const per = figures.tokens_per_second_per_gpu, all = figures.tokens_per_second_range, share = per / figures.tokens_per_second;
  const ends = all && all.map(one => one * share);
  rate.show(format.count(Math.round(per)), "tok/s", `${format.si(figures.tokens_per_second)} tok/s in all, ${format.si(figures.tokens_per_day)} a day`, gauge(per, ends, 1.6 * per, "range of the rate"));
  if (!figures.fits) mfu.show("—", "", `${format.percent(figures.mfu)} on a device with more memory, as are time and rate`, null);
  else mfu.show(format.percent(figures.mfu).slice(0, -1), "%", inWords(figures.mfu_range) + format.range(figures.mfu_range, format.percent), gauge(figures.mfu, figures.mfu_range, 1, "range of the utilisation, of 100%"));
  memory.show(format.gigabytes(figures.memory_bytes), `of ${format.gigabytes(device_memory_bytes)} GB`, `${format.percent(figures.range_share, 0)} range: ${format.range(figures.memory_bytes_range, format.gigabytes)} GB`,
    { ...gauge(figures.memory_bytes, figures.memory_bytes_range, Math.max(device_memory_bytes, figures.memory_bytes), "share of the device"), colour: figures.fits ? "var(--accent)" : "var(--bad)" });
}

export function memoryBars(width, { ranks, figures, device_memory_bytes, shown }) {
  const rows = ranks.map((parts, rank) => ({
    label: shown.fields.pp > 1 ? `pp ${rank}` : "", rank,
    parts: Object.entries(parts).map(([name, value]) => ({ name, value, colour: colours.memory(name) })),
  }));
  return stackedBars(width, {
    rows, label: `memory of ${rows.length} pipeline ranks against the device's ${format.gigabytes(device_memory_bytes)} GB`,
    marks: [{ value: figures.memory_limit_bytes, label: "limit of a plan" }, { value: device_memory_bytes, label: "device", hard: true }],
    write: value => `${Math.round(value / 1e9)} GB`,
    describe: (row, part) => [`${shown.fields.pp > 1 ? `pipeline rank ${row.rank}: ` : ""}${part.name}`, `${format.gigabytes(part.value)} GB`],
  });
}

const memoryTable = figures => table(["component", ">GB", ">share"],
  Object.entries(figures.memory_by_component).filter(([, size]) => size > 0).map(([name, size]) => [[swatch(colours.memory(name)), name], format.gigabytes(size), format.percent(size / figures.memory_bytes, 0)]),
  { testid: "memory-table", foot: ["total", format.gigabytes(figures.memory_bytes), ""] });

const causesOf = ({ figures, causes }) => Object.entries(figures.time_by_cause).filter(([, length]) => Math.abs(length) >= 5e-4 * figures.step_seconds)
  .map(([name, value]) => ({ name: causes[name], value, colour: colours.cause(name) }));

export function timeBar(width, payload) {
  return stackedBars(width, {
    rows: [{ parts: causesOf(payload) }], height: 44, most: payload.figures.step_seconds * 1.001, label: "time of a step by cause",
    write: format.seconds, describe: (_, part) => [part.name, `${format.seconds(part.value)}, ${format.percent(part.value / payload.figures.step_seconds)} of the step`],
  });
}

const timeTable = payload => table(["cause", ">time", ">share"],
  causesOf(payload).map(one => [[swatch(one.colour), one.name], format.seconds(one.value), format.percent(one.value / payload.figures.step_seconds)]),
  { testid: "time-table", foot: ["total", format.seconds(payload.figures.step_seconds), ""] });

function axesOf({ figures }) {
  const found = new Map();
  for (const { axis, inside, across } of figures.traffic) {
    const before = found.get(axis) || { axis, inside: 0, across: 0 };
    found.set(axis, { axis, inside: before.inside + inside, across: before.across + across });
  }
  return [...found.values()].filter(one => one.inside + one.across > 4096);
}

export function trafficBars(width, payload) {
  const axes = axesOf(payload);
  if (!axes.length) return element("p", { class: "dim" }, "One rank has nobody to send to.");
  return stackedBars(width, {
    rows: axes.map(({ axis, inside, across }) => ({ label: axis, note: format.bytes(inside + across), parts: [
      { name: `in the node, ${payload.question.links.inside.name}`, value: inside, colour: colours.INSIDE },
      { name: `between nodes, ${payload.question.links.across.name}`, value: across, colour: colours.ACROSS }] })),
    height: 30, write: format.bytes, label: "bytes that a rank sends, by axis and link", describe: (row, part) => [`${row.label}: ${part.name}`, format.bytes(part.value)],
  });
}

const trafficTable = payload => axesOf(payload).length === 0 ? "" : element("div", {}, legend([{ name: `in the node (${payload.question.links.inside.name})`, colour: colours.INSIDE }, { name: `between nodes (${payload.question.links.across.name})`, colour: colours.ACROSS }]),
  table(["axis", "collective", ">calls", ">in the node", ">between nodes"],
    payload.figures.traffic.filter(one => one.payload > 4096).map(one => [one.axis, one.kind, format.count(one.calls), format.bytes(one.inside), format.bytes(one.across)]), { testid: "traffic-table" }));
