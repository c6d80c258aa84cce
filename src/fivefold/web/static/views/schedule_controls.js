// The sliders of a schedule. They show what the payload says, and tell what the user wants in the words of `fivefold draw`.
import { select, slider } from "../lib/controls.js";
import { card, element } from "../lib/dom.js";
import * as format from "../lib/format.js";

const TIMES = [
  ["f", "F", "Forward pass of a microbatch on a whole rank"],
  ["i", "I", "Gradient of the input"],
  ["w", "W", "Gradient of the weights; B is I + W"],
  ["comm", "message", "How long a message from rank to rank takes"],
  ["ep", "experts", "Of F and of I, the messages of experts: joined pairs (F&B) hide them"],
];

/** The words of the address for what is shown, with something changed: { pp: 8 } or { times: { f: 2 } } */
export function wordsOf(asked, changed) {
  const now = { ...asked, ...changed, times: { ...asked.times, ...(changed.times || {}) } };
  const shortest = Math.min(now.times.f, now.times.i);
  const times = { ...now.times, ep: Math.min(now.times.ep, shortest) };
  const slow = now.slow === null || now.slow === "" || Number(now.slow) >= now.pp ? "" : `${now.slow}=${now.factor}`;
  return {
    schedule: now.schedule, pp: String(now.pp), microbatches: String(now.microbatches), chunks: now.chunks ? String(now.chunks) : "", slow,
    times: Object.entries(times).filter(([name, value]) => value !== ("fiw".includes(name) ? 1 : 0)).map(([name, value]) => `${name}=${value}`).join(","),
  };
}

export function scheduleControls({ onMove, live }) {
  const schedule = select({ name: "schedule", label: "Schedule", onInput: value => onMove({ schedule: value }) });
  const pp = slider({ name: "pp", label: "pp · ranks", hint: "Ranks of the pipeline", onInput: value => onMove({ pp: value }) });
  const microbatches = slider({ name: "microbatches", label: "microbatches", hint: "Per step", onInput: value => onMove({ microbatches: value }) });
  const chunks = slider({ name: "chunks", label: "chunks", hint: "Stages per rank", onInput: value => onMove({ chunks: value }) });
  const times = Object.fromEntries(TIMES.map(([name, label, hint]) => [name, slider({ name, label, hint, write: format.time, onInput: value => onMove({ times: { [name]: value } }) })]));
  const slow = select({ name: "slow", label: "Slow rank", onInput: value => onMove({ slow: value }) });
  const factor = slider({ name: "factor", label: "takes", hint: "How many times as long the slow rank takes", write: value => `×${value}`, onInput: value => onMove({ factor: value }) });
  const needs = element("p", { class: "dim small" });
  let hand = "";
  const durations = card("Durations of a whole rank", {}, TIMES.map(([name]) => times[name].element), element("div", { class: "gap" }, slow.element), factor.element);
  const whole = element("div", { class: "stack" }, card("Pipeline", { "data-testid": "controls" }, schedule.element, needs, pp.element, microbatches.element, chunks.element), durations);
  whole.addEventListener("input", event => { hand = event.target.dataset.testid; });
  return {
    element: whole,
    show({ asked, steps, schedules, refused, clock, fixed }, stale) {
      durations.hidden = Boolean(clock || fixed);  // those of a planner differ from stage to stage; those of a file stay
      const off = !live, held = name => ({ off, held: stale && hand === `slider-${name}` });
      schedule.set(schedules.map(one => ({ value: one.name, text: one.name })), asked.schedule, { off });
      const about = schedules.find(one => one.name === asked.schedule);
      needs.textContent = about.needs ? `needs ${about.needs} (m microbatches, p ranks)` : about.made ? "searched anew for these durations" : "";
      pp.set(steps.pp, asked.pp, { ...held("pp"), bad: Boolean(refused) });
      microbatches.set(steps.microbatches, asked.microbatches, { ...held("microbatches"), bad: Boolean(refused) });
      chunks.element.hidden = !asked.takes_chunks;
      chunks.set(steps.chunks, asked.chunks || asked.usual_chunks, held("chunks"));
      for (const [name] of TIMES) times[name].set(steps[name], asked.times[name], held(name));
      slow.set([{ value: "", text: "none" }, ...steps.slow.map(rank => ({ value: String(rank), text: `rank ${rank}` }))], asked.slow ?? "", { off });
      factor.element.hidden = asked.slow === null;
      factor.set(steps.factor, asked.factor, held("factor"));
    },
  };
}
