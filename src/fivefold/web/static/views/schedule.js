// Schedule: a pipeline schedule on the clock, its sliders, its memory, and all the others small beside each other.
import { card, element, problemText, side } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { newest, replacing } from "../lib/source.js";
import * as state from "../lib/state.js";
import { table } from "../lib/table.js";
import { DEFAULTS } from "./plan_controls.js";
import { drawEvery } from "./schedule_every.js";
import { scheduleControls, wordsOf } from "./schedule_controls.js";
import { drawTimeline } from "./schedule_timeline.js";

const PAUSE = 600;  // ms without a move after which all others are asked for: they keep the cores busy for a second
const NAMES = ["schedule", "pp", "microbatches", "chunks", "times", "slow"];

function figure(name, testid, about) {
  const value = element("span", { "data-testid": testid }), unit = element("span", { class: "unit" }), more = element("div", { class: "about" }, about);
  return {
    element: element("div", { class: "figure" }, element("div", { class: "name" }, name), element("div", { class: "value" }, value, " ", unit), more),
    show(text, measure = "", said = about) { value.textContent = text; unit.textContent = measure; more.textContent = said; },
  };
}

export function mount(root, source) {
  let words = { ...state.read().words }, timer = 0, others = "", shown = null, typed = true, told = null;  // typed: the question on its way is that of the address; told: what was wrong with it
  const open = source.live || source.plays;
  const controls = scheduleControls({ onMove: move, live: open });
  const every = drawEvery({ onTake: name => move({ schedule: name }), live: open });
  const timeline = drawTimeline();
  const makespan = figure("Makespan", "makespan", "from the first start to the last end"), bubble = figure("Bubble", "bubble", "of all ranks' time until the last end");
  const span = figure("Bubble of the span", "bubble-span", "of the rank that waits longest, while it is at work"), peak = figure("Peak memory", "peak", "");
  const notice = element("p", { class: "notice bad", role: "alert", hidden: true, "data-testid": "refused" });
  const ranks = element("div");
  const column = side(controls.element);
  column.classList.toggle("plays", source.plays);
  root.append(element("div", { class: "split" }, column,
    element("div", { class: "stack" }, notice,
      element("div", { class: "figures" }, makespan.element, bubble.element, span.element, peak.element),
      timeline.element, every.element, card("What each rank's time goes to", { "data-testid": "ranks-card" }, ranks))));

  const asking = newest(asked => source.payload(asked), show, fail);
  const listing = replacing((asked, signal) => source.part("every", asked, { signal }), answer => every.show(answer), alone);
  const making = replacing((asked, signal) => source.part("made", asked, { signal }), made, alone);

  function move(changed) {
    if (!shown) return;
    told = null;
    typed = false;
    words = wordsOf(shown.asked, changed);
    asking(words);
  }

  /** A file may have one schedule alone. */
  function alone(error) {
    every.fail(error);
    every.element.hidden = !source.live;
  }

  function fail(error) {
    notice.replaceChildren(...problemText(error));
    notice.hidden = false;
    if (!typed || error.status !== 400) return;
    told = error;
    typed = false;
    state.forget("schedule");
    asking({});
  }

  function show(payload, asked, stale) {
    shown = payload;
    words = Object.fromEntries(NAMES.map(name => [name, asked[name] ?? ""]));
    controls.show(payload, stale);
    if (source.live && !stale && !told) state.write("schedule", { ...words, schedule: payload.asked.schedule, pp: payload.asked.pp, microbatches: payload.asked.microbatches });
    every.mark(payload.asked.schedule);
    const made = payload.schedules.find(one => one.name === payload.asked.schedule).made;
    if (!made) draw(payload);
    else timeline.wait();
    const wanted = JSON.stringify(payload.asks.every);
    if (wanted !== others) {
      others = wanted;
      every.wait();
      clearTimeout(timer);
      timer = setTimeout(() => { listing(payload.asks.every); making(payload.asks.made); }, source.live ? PAUSE : 0);
    } else if (made) {
      making(payload.asks.made);
    }
  }

  function made(answer) {
    every.add(answer);
    if (shown.asked.schedule === answer.schedule) draw({ ...shown, drawn: answer.drawn, refused: answer.refused });
  }

  function draw(payload) {
    notice.hidden = !payload.refused && !told;
    if (told) notice.replaceChildren(...problemText(told, DEFAULTS));
    else if (payload.refused) notice.textContent = `${payload.asked.schedule} is refused: ${payload.refused}`;
    timeline.show(payload);
    const { drawn } = payload;
    if (!drawn) {
      for (const one of [makespan, bubble, span, peak]) one.show("–");
      ranks.replaceChildren();
      return;
    }
    const { figures } = drawn, most = Math.max(...figures.peak_activations), fullest = figures.peak_activations.indexOf(most);
    const { microbatches } = payload.asked, all = payload.microbatches || microbatches;
    makespan.show(format.time(figures.makespan), payload.clock || "", payload.clock && `${microbatches < all ? `of the first ${microbatches} of ${all} microbatches, ` : ""}in the planner's durations` || undefined);
    bubble.show(format.percent(figures.bubble_makespan, 2), "", microbatches < all ? `of all ranks' time in these ${microbatches} microbatches; in ${all} it is a smaller share` : undefined);
    span.show(format.percent(figures.bubble_span, 2));
    peak.show(format.time(most), "A", `on rank ${fullest}; A is what a microbatch keeps on a rank`);
    const unit = payload.clock ? `, ${payload.clock}` : "";
    ranks.replaceChildren(table([">rank", `>computes${unit}`, `>waits in between${unit}`, `>before and after${unit}`, ">peak, A"],
      drawn.ranks.map((rank, at) => [String(at), ...[rank.busy, rank.wait, rank.idle, figures.peak_activations[at]].map(format.time)]), { testid: "ranks" }));
  }

  const listening = state.onChange(() => {
    const now = state.read();
    told = null;
    typed = true;
    if (now.view === "schedule") asking({ ...now.words });
  });
  asking(Object.fromEntries(NAMES.map(name => [name, words[name] ?? ""])));
  return () => { listening(); clearTimeout(timer); };
}
