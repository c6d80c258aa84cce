// Plan: a question (model, cluster, batch), a layout on sliders, and what the planner says of it while they move.
import { element, side } from "../lib/dom.js";
import { newest, replacing } from "../lib/source.js";
import * as state from "../lib/state.js";
import { DEFAULTS, layoutControls, questionControls } from "./plan_controls.js";
import { drawFigures } from "./plan_figures.js";
import { drawNeighbours, drawRanking } from "./plan_ranking.js";

const QUESTION = ["model", "cluster", "batch", "seq", "precision", "software"];
const PAUSE = 250;  // ms without a move after which the neighbours are asked for

export function mount(root, source) {
  let words = { ...state.read().words };      // the question and the layout, as in the address
  let shown = null;                           // the last payload
  let base = words.layout || "";              // the layout that the slider in hand moves away from
  let hand = "";                              // that slider
  let free = !words.layout;                   // nobody has chosen a layout: the planner's choice is taken when it comes
  let timer = 0, ranked = null, ranking = "";
  let pending = true;                         // a newer question than the one that is shown is on its way
  let judged = "";                            // the question whose neighbours are awaited or shown
  let typed = true;                           // the question on its way is that of the address
  let told = null;                            // what was wrong with the address: the defaults are shown below it

  const question = questionControls(ask, source.live);
  const layout = layoutControls({ onMove: move, onGrab: grab, onBest: takeBest, live: source.live });
  const figures = drawFigures({ onTake: take });
  const takes = layout => source.holds({ layout });
  const why = drawNeighbours({ onTake: take, takes });
  const list = drawRanking({ onTake: take, takes });
  root.append(element("div", { class: "stack" }, question.element,
    element("div", { class: "split" }, side(layout.element),
      element("div", { class: "stack" }, figures.element, why.element, list.element))));

  const asking = newest(asked => source.payload(asked), show, failed);
  const judging = replacing((asked, signal) => source.part("why", asked, { signal }), (answer, asked) => { if (JSON.stringify(asked) === judged) { why.show(answer); figures.because(answer.against); } }, (error, asked) => { if (JSON.stringify(asked) === judged) why.fail(error); });
  const searching = replacing((asked, signal) => source.part("search", asked, { signal }), found, error => { list.fail(error); free = false; if (shown) figures.show(shown, false); });

  const only = names => Object.fromEntries(names.map(name => [name, words[name]]).filter(([, value]) => value));
  const answered = found => { figures.element.hidden = list.element.hidden = !found; };  // else they would be another question's
  const refresh = move => { clearTimeout(timer); judged = ""; pending = true; why.wait(); asking({ ...only(QUESTION), layout: base, move }); };

  function ask(name, value) {
    told = null;
    typed = false;
    const before = only(QUESTION);
    words = { ...words, [name]: value };
    if (name === "model" || name === "cluster") { delete words.batch; delete words.layout; base = ""; free = true; }
    if (name === "model") { delete words.seq; delete words.precision; }
    if (name === "seq") { delete words.batch; }
    if (name === "batch" || name === "seq") { base = shown?.shown?.text || base; free = true; }
    if (JSON.stringify(before) !== JSON.stringify(only(QUESTION))) refresh("");
  }

  function grab(name) {
    if (!shown) return;
    if (name === hand) return;
    hand = name;
    base = shown?.shown?.text || base;
  }

  function move(name, value) {
    told = null;
    typed = false;
    grab(name);
    free = false;
    refresh(`${name}=${value}`);
  }

  function take(text) {
    told = null;
    typed = false;
    hand = "";
    free = false;
    base = text;
    refresh("");
  }

  function takeBest() {
    if (ranked) take(ranked.best.layout);
  }

  function show(payload, asked, stale) {
    shown = payload;
    answered(true);
    pending = stale;
    const current = asked.move ? asked.move.split("=")[0] : "";
    if (!asked.move) base = payload.shown?.text || base;
    if (!stale) words = { ...only(QUESTION), model: payload.question.model, cluster: payload.question.cluster, layout: payload.wanted.text };
    question.show(payload);
    if (told) question.fail(told, DEFAULTS);
    layout.show(payload, current, stale);
    const wanted = JSON.stringify(payload.asks.search), anew = wanted !== ranking;
    if (anew) ranked = null;
    figures.show(payload, source.live && free && !ranked);
    if (source.live && !stale && !told) state.write("plan", words);
    if (anew) {
      ranking = wanted;
      list.wait();
      searching(payload.asks.search);
    }
    list.mark(payload.shown?.text);
    layout.best(ranked?.best.layout);
    figures.against(ranked?.best);
    clearTimeout(timer);
    timer = setTimeout(judge, source.live ? PAUSE : 0);
  }

  function judge() {
    if (pending) return;
    if (!shown.asks.why) { why.wait("No layout is shown, so that none is one change away."); return; }
    const asked = { ...shown.asks.why, best: source.live && ranked ? ranked.best.layout : "" };
    judged = JSON.stringify(asked);
    judging(asked);
  }

  function failed(error) {
    if (typed && error.status === 400) {
      told = error;
      typed = false;
      state.forget("plan");
      words = {};
      base = "";
      free = true;
      refresh("");
      return;
    }
    pending = false;
    question.fail(error);
    answered(false);
    why.wait("The question has no answer, so that no layout is one change away.");
  }

  function found(answer) {
    ranked = answer;
    layout.best(answer.best.layout);
    figures.against(answer.best);
    list.show(answer);
    if (free && source.live) { free = false; base = answer.best.layout; hand = ""; refresh(""); }
    else judge();  // now there is a choice to hold the layout against
  }

  const listening = state.onChange(() => {
    const now = state.read();
    if (now.view !== "plan") return;
    told = null;
    typed = true;
    words = { ...now.words };
    base = words.layout || "";
    hand = "";
    free = !base;
    refresh("");
  });
  refresh("");
  return () => { listening(); clearTimeout(timer); };
}
