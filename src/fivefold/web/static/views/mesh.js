// Mesh: every rank of a node and of the cluster, coloured by axis; one of them with its part and its groups; one layer's messages.
import * as colours from "../lib/colours.js";
import { button, slider } from "../lib/controls.js";
import { breakable, card, element, layoutText, problemText, side } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { swatch } from "../lib/plot.js";
import { newest } from "../lib/source.js";
import * as state from "../lib/state.js";
import { everyNode, everyRank, oneNode, oneReplica } from "./mesh_arrange.js";
import { board } from "./mesh_board.js";
import { drawLayer } from "./mesh_layer.js";
import { drawRank } from "./mesh_rank.js";
import { DEFAULTS, questionControls } from "./plan_controls.js";

const QUESTION = ["model", "cluster", "batch", "seq", "precision", "software"];
const DEGREES = [["tp", "Ranks that share every matrix"], ["pp", "Ranks that share the layers"], ["cp", "Ranks that share every sequence"], ["ep", "Ranks that experts are dealt out over"], ["zero", "What is sharded over dp x cp"]];

export function mount(root, source) {
  let words = { ...state.read().words }, shown = null, kept = null, asked = -1, typed = true, told = null;  // typed: the question on its way is that of the address; told: what was wrong with it
  if (!words.layout && source.live) words = { ...words, ...some(state.last("plan"), [...QUESTION, "layout"]), ...words };
  const look = { axis: "", sizes: {}, chosen: null, groups: {}, wire: null };
  const question = questionControls(change, source.live);
  const sliders = Object.fromEntries(DEGREES.map(([name, hint]) => [name, slider({ name, label: name === "zero" ? "ZeRO" : name, hint, write: format.count, onInput: value => refresh({ move: `${name}=${value}` }) })]));
  const layout = element("p", { class: "boxed", "data-testid": "layout" }), notice = element("p", { class: "notice bad", role: "alert", hidden: true, "data-testid": "notice-mesh" });
  const rank = drawRank(), layer = drawLayer({ onShow: wire, onLayer: value => refresh({ layer: String(value) }), live: source.live });
  const boards = [
    board(width => shown?.map && (shown.map.singly ? everyRank : everyNode)(shown.map, look, width), look, { label: "The cluster", testid: "cluster", onChoose: cell => choose(shown.map.singly ? cell.rank : cell.rank + (look.chosen?.part.rank || 0) % shown.map.gpus) }),
    board(width => look.chosen && !shown.map.singly && oneNode(look.chosen, look, width), look, { label: "One node", testid: "node", onChoose: cell => choose(cell.rank) }),
    board(width => look.chosen && oneReplica(look.chosen, look, width), look, { label: "One replica of the model", testid: "replica", onChoose: cell => choose(cell.rank) }),
  ];
  const axes = element("div", { class: "row axes", role: "group", "aria-label": "Coloured by" }), where = element("p", { class: "dim small", "data-testid": "where" });
  const title = element("h2", {}), nodeTitle = element("h2", {}), replicaTitle = element("h2", {});
  const nodeCard = element("section", { class: "card", "data-testid": "node-card" }, element("div", { class: "card-head" }, nodeTitle), boards[1].element);
  const replicaCard = element("section", { class: "card", "data-testid": "replica-card" }, element("div", { class: "card-head" }, replicaTitle), boards[2].element);
  const answer = element("div", { class: "stack" }, element("section", { class: "card", "data-testid": "map-card" }, element("div", { class: "card-head" }, title, axes), where, boards[0].element),
    nodeCard, layer.element, replicaCard);
  root.append(element("div", { class: "stack" }, question.element, notice, element("div", { class: "split" },
    side(card("Layout", {}, DEGREES.map(([name]) => sliders[name].element), layout), rank.element), answer)));

  const asking = newest(all => source.payload(all), show, fail);
  const pointing = newest(all => source.part("rank", all), answer => { if (answer.part.rank === asked) light(answer); }, fail);

  function some(all, names) { return Object.fromEntries(names.map(name => [name, all[name]]).filter(([, value]) => value)); }
  function refresh(changed = {}) {
    const { move, ...others } = changed;
    if (move || others.layer) { told = null; typed = false; }  // the user's own change
    words = { ...words, ...others };
    asking({ ...some(words, [...QUESTION, "layout", "rank", "layer"]), move: move || "" });
  }
  function change(name, value) {
    told = null;
    typed = false;
    const next = { ...words, [name]: value };
    if (name === "model" || name === "cluster") for (const one of ["batch", "layout", "rank", "layer"]) delete next[one];
    if (name === "model") { delete next.seq; delete next.precision; }
    if (name === "seq") delete next.batch;
    words = next;
    refresh();
  }
  const answered = found => { rank.element.hidden = answer.hidden = !found; };  // else they would be another question's
  function fail(error) {
    notice.replaceChildren(...problemText(error));
    notice.hidden = false;
    answered(false);
    if (!typed || error.status !== 400) return;
    told = error;
    typed = false;
    state.forget("mesh");
    words = {};
    look.axis = "";
    refresh();
  }

  function show(payload, all, stale) {
    shown = payload;
    answered(payload.map);
    question.show(payload);
    const { fields } = payload.wanted, hand = all.move.split("=")[0];
    for (const [name] of DEGREES) sliders[name].set(payload.steps[name], fields[name], { off: !source.live, bad: payload.problems.length > 0 && name === hand, held: stale && name === hand });
    sliders.ep.element.hidden = !payload.question.experts;
    notice.hidden = !payload.problems.length && !told;
    if (told) notice.replaceChildren(...problemText(told, DEFAULTS));
    else if (payload.problems.length) notice.replaceChildren(...breakable(`${payload.problems.join(" · ")}${payload.shown ? ` · shown is the nearest that is legal: ${payload.shown.text}` : ""}`));
    layout.replaceChildren(layoutText(payload.shown ? payload.shown.text : payload.wanted.text));
    if (!payload.map) return;
    const { map } = payload;
    words = { ...some(words, QUESTION), model: payload.question.model, cluster: payload.question.cluster, layout: payload.shown.text, rank: String(payload.chosen.part.rank), ...(words.layer ? { layer: words.layer } : {}) };
    look.sizes = Object.fromEntries(map.axes.map(one => [one.axis, one.ranks]));
    if (!look.sizes[look.axis]) look.axis = map.axes[0]?.axis || "";
    title.textContent = map.singly ? `${format.count(payload.shown.world)} ranks on ${format.count(map.nodes)} node${map.nodes > 1 ? "s" : ""}` : `${format.count(payload.shown.world)} ranks, node by node`;
    axes.replaceChildren(...map.axes.map(one => button([swatch(colours.axis(one.axis)), `${one.axis} = ${format.count(one.ranks)}`], { "data-testid": `colour-${one.axis}`, "aria-pressed": String(one.axis === look.axis), onClick: event => paint(one.axis, event.currentTarget) })));
    nodeCard.hidden = map.singly;
    layer.show(payload.layer);
    paint(look.axis);
    light(payload.chosen, stale);
    if (!source.live && !kept) source.part("ranks").then(all => { kept = new Map(all.map(one => [one.part.rank, one])); }, () => { kept = new Map(); });
  }

  /** The address has the layout that was asked for, which may not be the one that is shown. */
  function keep() { if (source.live && !told) state.write("mesh", { ...words, layout: shown.wanted.text }); }

  function paint(axis, pressed) {
    look.axis = axis;
    if (pressed) for (const one of axes.children) one.setAttribute("aria-pressed", String(one === pressed));
    const about = shown.map.axes.find(one => one.axis === axis);
    where.textContent = about ? `${axis}: ${about.where}. Shade is a rank's place along ${axis}, 0 darkest; outlined are the groups of the chosen rank.` : "One rank: there is nothing to divide.";
    for (const one of boards) one.update();
  }

  function choose(number) {
    if (number === asked || (look.chosen?.part.rank === number && asked < 0)) return;
    asked = number;
    if (!source.live) { if (kept?.has(number)) light(kept.get(number)); return; }
    pointing({ ...some(words, [...QUESTION, "layout"]), rank: String(number) });
  }

  function light(chosen, stale = false) {
    look.chosen = chosen;
    asked = chosen.part.rank;
    look.groups = chosen.groups;
    if (look.wire) look.wire = { ...look.wire, own: chosen.groups[look.wire.group] };
    rank.show(chosen, shown.map);
    nodeTitle.textContent = `Node ${format.count(chosen.node.number)}`;
    replicaTitle.textContent = `The model once: replica ${chosen.replica.dp}${chosen.replica.whole ? "" : ", one place along cp"}, a line for each pipeline rank`;
    words = { ...words, rank: String(chosen.part.rank) };
    if (!stale) keep();
    for (const one of boards) one.update();
  }

  function wire(sent, phase) {
    const before = look.wire;
    look.wire = sent && { axis: sent.group, kind: sent.kind, group: sent.group, groups: shown.map.groups[sent.group] || [], own: look.chosen?.groups[sent.group], phase };
    look.groups = sent && look.chosen ? { [sent.group]: look.chosen.groups[sent.group] || [] } : look.chosen?.groups || {};
    if (before || sent) for (const one of boards) one.update();
  }

  const listening = state.onChange(() => {
    const now = state.read();
    if (now.view === "mesh") { told = null; typed = true; words = { ...now.words }; refresh(); }
  });
  refresh();
  return () => { listening(); layer.end(); };
}
