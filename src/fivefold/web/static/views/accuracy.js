// Accuracy: what the planner predicts of runs that were measured and published, beside a model that knows next to nothing.
import { select } from "../lib/controls.js";
import { card, element } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { responsive } from "../lib/plot.js";
import * as state from "../lib/state.js";
import { bandsLegend, lookOf, scatter, span } from "./accuracy_scatter.js";
import { FIRST, drawRow, orders, rowTable, sourceTable } from "./accuracy_tables.js";

const ALL = "all", SHAPES = ["predicted ÷ measured", "step times"];
const KINDS = [{ value: ALL, text: "all models" }, { value: "dense", text: "dense" }, { value: "experts", text: "with experts" }];

function figure(name, testid) {
  const value = element("span", { "data-testid": testid }), about = element("div", { class: "about" });
  return { element: element("div", { class: "figure" }, element("div", { class: "name" }, name), element("div", { class: "value" }, value), about), show(text, said) { value.textContent = text; about.textContent = said; } };
}

export function mount(root, source) {
  let payload = null, rows = [], lines = [], texts = [], looks = new Map(), at = null, shown = FIRST, order = orders[0], left = true, shape = SHAPES[0], ends = [0.1, 10];
  const NONE = { source: ALL, kind: ALL, model: ALL, gpu: ALL }, inAddress = () => ({ ...NONE, ...Object.fromEntries(Object.entries(state.read().words).filter(([name]) => name in NONE)) });
  let words = inAddress();
  const notice = element("p", { class: "notice bad gap", role: "alert", hidden: true, "data-testid": "accuracy-refused" });
  const gone = new AbortController();

  const controls = Object.fromEntries([["source", "Source"], ["kind", "Kind"], ["model", "Model"], ["gpu", "GPU"]].map(([name, label]) => [name, select({ name: `accuracy-${name}`, label, onInput: value => filter(name, value) })]));
  const sorting = select({ name: "accuracy-order", label: "Order", onInput: value => { order = value; list(); } });
  const shaping = select({ name: "accuracy-shape", label: "Picture", onInput: value => { shape = value; planner.update(); null_.update(); } });
  const said = element("span", { class: "dim small", "aria-live": "polite", "data-testid": "accuracy-status" });
  const error = figure("Mean error of all runs", "mean-error"), near = figure("Within 10%", "near"), far = figure("Within 25%", "far"), inside = figure("Inside the predicted range", "inside");
  const timed = () => chosen().filter(row => row.error !== null);
  const faint = () => words.source === ALL && words.model === ALL && words.gpu === ALL && words.kind === ALL ? [] : rows.filter(row => row.error !== null && !passes(row));
  const picture = (of, label, testid) => responsive(width => payload && scatter(width, { rows: timed(), faint: faint(), of, ends, bands: payload.bands, looks, at, label, onPick: pick, ratio: shape === SHAPES[0] }), { "data-testid": testid, tabindex: 0, role: "group", "aria-label": `${label}; left and right go from run to run` });
  const planner = picture(row => row.predicted_seconds, "the planner's step times against the measured ones", "scatter"), null_ = picture(row => row.null_seconds, "the null model's step times against the measured ones", "scatter-null");
  const row = drawRow(), sources = element("div"), listed = element("div"), legend = element("div");
  root.append(element("div", { class: "stack" },
    card("Predicted against measured", { aside: said }, element("div", { class: "row" }, Object.values(controls).map(one => one.element), shaping.element), notice),
    element("div", { class: "figures" }, error.element, near.element, far.element, inside.element),
    element("div", { class: "accuracy-grid" },
      card("The planner", {}, planner.element, legend), card("Null model: one utilisation for each source", {}, null_.element, element("p", { class: "dim small" }, "It knows a source's best single share of the peak rate, found with its measured times, and nothing of layouts.")), row.element,
      card("Sources", { class: "card every" }, sources)),
    card("Runs", { aside: sorting.element }, listed)));

  for (const one of [planner, null_]) one.element.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const along = timed().sort((a, b) => a.measured_seconds - b.measured_seconds), now = along.indexOf(at);
    if (along.length) pick(along[now < 0 ? 0 : Math.max(0, Math.min(along.length - 1, now + step))]);
  });

  const passes = one => (words.source === ALL || one.group === words.source || one.source === words.source) && (words.model === ALL || one.model === words.model)
    && (words.gpu === ALL || one.cells.gpu === words.gpu) && (words.kind === ALL || one.experts === (words.kind === "experts"));
  const chosen = () => rows.filter(passes);

  function filter(name, value) {
    words = { ...words, [name]: value };
    notice.hidden = true;
    shown = FIRST;
    state.write("accuracy", Object.fromEntries(Object.entries(words).filter(([, one]) => one !== ALL)), true);
    draw();
  }

  function pick(one) {
    if (one === at) return;
    at = one;
    row.show(one, texts, payload.range_share);
    planner.update(); null_.update();
    for (const line of listed.querySelectorAll("tr[data-row]")) line.classList.toggle("chosen", line.dataset.row === one.key);
  }

  function list() {
    sorting.set(orders, order);
    listed.replaceChildren(rowTable(chosen(), { order, shown, at, onPick: pick, onTake: one => { pick(one); row.element.scrollIntoView({ block: "center" }); }, onMore: more => { shown = more; list(); } }));
  }

  function draw() {
    const counted = names => [{ value: ALL, text: "all" }, ...names.sort((a, b) => a.localeCompare(b)).map(one => ({ value: one, text: one }))];
    const values = of => [...new Set(rows.map(of).filter(Boolean))];
    const known = { source: [...payload.sources.map(one => one.name), ...lines.filter(one => one.experts).map(one => one.source)], kind: KINDS.map(one => one.value), model: values(one => one.model), gpu: values(one => one.cells.gpu) };
    const unknown = left ? [] : Object.keys(NONE).filter(name => words[name] !== ALL && !known[name].includes(words[name]));
    if (unknown.length) {
      notice.textContent = `The published runs have no ${unknown.map(name => `${name === "gpu" ? "GPU" : name} '${words[name]}'`).join(" and no ")}. Shown instead are all.`;
      notice.hidden = false;
      words = { ...words, ...Object.fromEntries(unknown.map(name => [name, ALL])) };
    }
    controls.source.set(counted(known.source), words.source);
    shaping.set(SHAPES, shape);
    controls.kind.set(KINDS, words.kind);
    controls.model.set(counted(known.model), words.model);
    controls.gpu.set(counted(known.gpu), words.gpu);
    const mine = timed(), sizes = mine.map(one => Math.abs(one.error)), share = of => mine.length ? format.percent(mine.filter(of).length / mine.length, 0) : "—";
    const ranged = mine.filter(one => one.predicted_range), held = ranged.filter(one => one.measured_seconds >= one.predicted_range[0] && one.measured_seconds <= one.predicted_range[1]);
    const mean = of => mine.length ? format.percent(mine.reduce((sum, one) => sum + of(one), 0) / mine.length) : "—", off = one => Math.abs(one.null_seconds / one.measured_seconds - 1);
    error.show(mean(one => Math.abs(one.error)), `${format.count(mine.length)} runs, each counted once; null model ${mean(off)}; the mean of sources is below`);
    near.show(share(one => Math.abs(one.error) <= 0.1), `null model ${share(one => off(one) <= 0.1)}`);
    far.show(share(one => Math.abs(one.error) <= 0.25), `null model ${share(one => off(one) <= 0.25)}`);
    inside.show(ranged.length ? format.percent(held.length / ranged.length, 0) : "—", `meant to hold in ${format.percent(payload.range_share, 0)} of cases; largest error ${sizes.length ? format.percent(Math.max(...sizes), 0) : "—"}`);
    ends = span(rows.filter(one => one.error !== null));
    legend.replaceChildren(bandsLegend(payload.bands));
    planner.update(); null_.update();
    sources.replaceChildren(sourceTable(lines.filter(one => words.kind === ALL || one.experts === (words.kind === "experts")), looks, words.source, name => filter("source", words.source === name ? ALL : name)));
    list();
    if (mine.length && !left && !(at && passes(at))) pick(mine.find(one => one.source === "llama3") || mine[0]);
  }

  /** Rows of a source, or of all, as they come. */
  function take(answer) {
    const before = texts.length;
    texts = [...texts, ...answer.texts];
    for (const one of answer.rows) {
      const long = Object.fromEntries(Object.entries(one.long).map(([name, where]) => [name, where + before]));
      rows.push({ ...one, long, group: one.experts ? `${one.source}, experts` : one.source, key: `${one.source}:${one.line}` });
    }
    lines = [...lines, ...answer.lines].sort((a, b) => a.source.localeCompare(b.source));
    looks = new Map();
    const files = payload.sources.map(one => one.name);
    for (const line of lines) looks.set(line.source, lookOf(files.indexOf(line.source.replace(/, experts$/, "")), line.experts));
  }

  async function load() {
    payload = await source.payload({});
    if (!source.live) take(await source.part("rows"));
    else for (const one of [...payload.sources].sort((a, b) => a.rows - b.rows)) {
      said.textContent = `predicting ${one.name}: ${format.count(rows.length)} runs so far …`;
      take(await source.part("rows", { source: one.name }, { signal: gone.signal }));
      draw();
    }
    left = false;
    said.textContent = `${format.count(rows.length)} published rows of ${payload.sources.length} sources, ${format.count(rows.filter(one => one.error !== null).length)} with a measured time`;
    draw();
    root.querySelector(".stack").dataset.loaded = "yes";
  }

  const listening = state.onChange(() => {
    if (state.read().view !== "accuracy") return;
    words = inAddress();
    notice.hidden = true;
    if (payload) draw();
  });
  load().catch(problem => { if (problem.name !== "AbortError") said.replaceChildren(element("span", { class: "bad" }, problem.message)); });
  return () => { listening(); gone.abort(); };
}
