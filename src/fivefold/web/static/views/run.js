// Run: training runs of the directories that were given, live: curves, events, experts, trace, job.
import { slider, toggle } from "../lib/controls.js";
import * as colours from "../lib/colours.js";
import { card, element, problemText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { responsive, swatch } from "../lib/plot.js";
import { newest, replacing } from "../lib/source.js";
import * as state from "../lib/state.js";
import { DEFAULTS } from "./plan_controls.js";
import { aboutTable, drawLoad, eventTable, latest, notRead, rate } from "./run_about.js";
import { SIGNS, chart, signOf } from "./run_curves.js";
import { drawTrace } from "./run_trace.js";

const OFTEN = 2000, SELDOM = 10000;  // ms between questions to a run that trains, and to one that does not
const SMOOTH = [0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98];
const CURVES = [
  { name: "tokens_per_second", title: "Tokens per second", write: format.si, share: true, zero: true },
  { name: "grad_norm", title: "Gradient norm, before clipping", write: format.digits3, share: true, log: true },
  { name: "lr", title: "Learning rate", write: rate, zero: true },
  { name: "mfu", title: "Model FLOPs utilisation", write: value => format.percent(value), share: true, zero: true, optional: true },
  { name: "memory", title: "Peak memory up to each step", write: format.bytes, zero: true },
  { name: "fullest", title: "Most loaded expert, times the mean", write: value => value.toFixed(2), share: true, optional: true },
  { name: "entropy", title: "Evenness of the experts' load", write: value => value.toFixed(3), share: true, optional: true },
];
const colour = at => colours.nth(at);

export function mount(root, source) {
  let payload = null, shown = [], smooth = 0.6, logLoss = false, timer = 0, gone = false, traced = "";
  let typed = true, told = null;  // typed: the question on its way is that of the address; told: what was wrong with it
  let lost = false;  // what is said above is that a run could not be followed
  const problem = element("div", { "aria-live": "polite", class: "problem" }), list = element("div", { class: "runs" }), said = element("span", { class: "dim small", "aria-live": "polite", "data-testid": "run-status" }), notes = element("div");
  const smoothing = slider({ name: "smooth", label: "Smoothing", hint: "an exponential mean; raw values are faint", onInput: value => { smooth = value; curves(); } });
  const logging = toggle({ name: "log-loss", label: "Loss on a logarithmic scale", onInput: value => { logLoss = value; curves(); } });
  const series = name => shown.map((run, at) => ({ name: run.name, colour: colour(at), xs: run.columns.step, ys: run.columns[name] || [] })).filter(one => one.ys.length);
  const until = () => Math.max(0, ...shown.map(run => Number(run.job.train?.steps) || 0));
  const loss = responsive(width => shown.length && chart(width, { height: width < 500 ? 230 : 300, label: "loss by step", write: value => value.toFixed(2), share: smooth, log: logLoss, until: until(),
    series: series("loss").map((one, at) => ({ ...one, dots: shown.find(run => run.name === one.name).evaluations })), events: shown.flatMap(run => run.events.filter(one => one.kind !== "note").map(one => ({ ...one, run: run.name }))) }), { "data-testid": "loss-plot" });
  const plots = CURVES.map(one => {
    const plot = responsive(width => {
      const mine = series(one.name).filter(line => line.ys.some(value => value !== null));
      if (!mine.length) return element("p", { class: "dim small" }, shown.some(run => run.training) && source.live ? "nothing yet" : "not recorded");
      return chart(width, { series: mine, write: one.write, label: `${one.title} by step`, share: one.share ? smooth : 0, log: one.log, zero: one.zero, until: until() });
    }, { "data-testid": `${one.name}-plot` });
    return { ...one, plot, card: card(one.title, {}, plot.element) };
  });
  const table = element("div"), events = element("div"), about = element("div"), load = drawLoad(), trace = drawTrace({ onStep: step => tracing({ run: traced, step }), live: source.live });
  const key = element("ul", { class: "legend" });
  const body = element("div", { class: "stack", hidden: true },
    card("Loss", { aside: key }, loss.element, element("div", { class: "row tools" }, smoothing.element, logging.element), table),
    element("div", { class: "grid2 plots" }, plots.map(one => one.card)), load.element, trace.element,
    card("What happened", {}, events), card("Job and environment", {}, about));
  root.append(element("div", { class: "stack" }, card("Runs", { aside: said }, list, notes), problem, body));

  const asking = newest(words => source.payload(words), show, refused);
  const tracing = replacing((words, signal) => source.part("trace", words, { signal }), answer => trace.show(answer), error => trace.fail(error));
  const picked = () => (state.read().words.runs || "").split(",").filter(Boolean);

  function failed(error, more) {
    problem.replaceChildren(element("p", { class: "notice bad", "data-testid": "run-problem" }, problemText(error, more)));
  }

  function refused(error) {
    failed(error);
    if (!typed) {  // boxes and address are again those of what is shown
      runs();
      state.write("run", { runs: shown.map(run => run.name).join(",") });
    } else if (!told && error.status === 400) {
      told = error;
      state.forget("run");
      asking({});
    }
  }

  function choose(name, on) {
    const names = shown.map(run => run.name), now = on ? [...names, name] : names.filter(one => one !== name);
    if (!now.length) { runs(); return; }
    typed = false;
    told = null;
    state.write("run", { runs: now.join(",") }, true);
    asking({ runs: now.join(",") });
  }

  /** The list, a box for each run. */
  function runs() {
    if (!payload.runs.length) {
      list.replaceChildren(element("p", { class: "notice", "data-testid": "no-runs" }, payload.given ? "There is no run in the directories that were given." : "No directory was given. Start the page with `fivefold ui --runs runs`: it reads that directory and no other."));
      return;
    }
    list.replaceChildren(...payload.runs.map(run => {
      const at = shown.findIndex(one => one.name === run.name), box = element("input", { type: "checkbox", "data-testid": `run-${run.name}`, checked: at >= 0, disabled: !source.live, onChange: event => choose(run.name, event.target.checked) });
      const live = at >= 0 && shown[at].training;
      return element("label", { class: at >= 0 ? "runbox on" : "runbox" }, box, at >= 0 ? swatch(colour(at)) : "", element("span", {}, element("strong", {}, run.name), live && source.live ? element("span", { class: "good small" }, " training") : "", element("span", { class: "dim small" }, [run.model, run.layout].filter(Boolean).join(", "))));
    }));
    notes.replaceChildren(...payload.notes.map(note => element("p", { class: "dim small" }, note)));
  }

  function status() {
    const training = shown.filter(run => run.training).map(run => run.name), text = !shown.length ? "" : !source.live ? "as it was when this file was made" : training.length ? `${training.join(", ")} ${training.length > 1 ? "train" : "trains"} now; the page follows` : "none of these trains now";
    if (said.textContent !== text) said.textContent = text;
  }

  function curves() {
    smoothing.set(SMOOTH, smooth);
    logging.set(logLoss);
    loss.update();
    for (const one of plots) {
      one.card.hidden = Boolean(one.optional) && !series(one.name).some(line => line.ys.some(value => value !== null));
      one.plot.update();
    }
  }

  function draw() {
    status();
    curves();
    const kinds = Object.keys(SIGNS).filter(kind => kind !== "note" && shown.some(run => run.events.some(one => one.kind === kind)));
    key.replaceChildren(...(shown.some(run => run.evaluations.length) ? [element("li", {}, "○ held out")] : []), ...kinds.map(kind => element("li", {}, signOf(kind), SIGNS[kind].name)));
    table.replaceChildren(latest(shown, colour), ...notRead(shown));
    events.replaceChildren(eventTable(shown, colour));
    load.show(shown);
  }

  function show(answer) {
    payload = answer;
    shown = answer.shown;
    if (told) failed(told, DEFAULTS); else problem.replaceChildren();
    runs();
    body.hidden = !shown.length;
    if (!shown.length) return;
    draw();
    about.replaceChildren(aboutTable(shown));
    traced = answer.asks.trace?.run || "";
    if (traced) tracing({ run: traced }); else trace.hide();
    root.dataset.loaded = "yes";
    again();
  }

  /** What has come since, of each run. */
  async function follow() {
    if (gone) return;
    if (!document.hidden) {
      const mine = shown;
      let changed = false;
      for (const run of mine) {
        try {
          const answer = await source.part("tail", { run: run.name, file: run.file, offset: run.offset, life: run.life });
          if (gone || shown !== mine) return;
          if (lost) { lost = false; problem.replaceChildren(); }
          changed = merge(run, answer) || changed;
        } catch (error) {
          lost = true;
          failed(error);
          break;
        }
      }
      if (changed) { draw(); runs(); } else status();
    }
    again();
  }

  function merge(run, answer) {
    const before = run.training, news = answer.anew || answer.records || answer.evaluations.length || answer.damaged || answer.events;
    if (answer.anew) Object.assign(run, { columns: answer.columns, evaluations: answer.evaluations, loads: answer.loads, damaged: answer.damaged, records: answer.records });
    else {
      for (const name of Object.keys(answer.columns)) run.columns[name] = [...(run.columns[name] || Array(run.records).fill(null)), ...answer.columns[name]];
      run.evaluations = [...run.evaluations, ...answer.evaluations];
      run.loads = [...run.loads, ...answer.loads];
      run.damaged += answer.damaged;
      run.records += answer.records;
    }
    Object.assign(run, { file: answer.file, offset: answer.offset, life: answer.life, training: answer.training });
    if (answer.events) run.events = answer.events;
    return Boolean(news) || before !== run.training;
  }

  function again() {
    clearTimeout(timer);
    if (source.live && !gone) timer = setTimeout(follow, shown.some(run => run.training) ? OFTEN : SELDOM);
  }

  const listening = state.onChange(() => {
    if (state.read().view !== "run") return;
    typed = true;
    told = null;
    asking({ runs: picked().join(",") });
  });
  asking({ runs: picked().join(",") });
  return () => { gone = true; listening(); clearTimeout(timer); };
}
