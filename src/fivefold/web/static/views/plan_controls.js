// The question's fields and the layout's sliders. They show what the payload says, and tell what the user wants.
import { button, number, select, slider, toggle } from "../lib/controls.js";
import { card, element, layoutText, problemText } from "../lib/dom.js";
import * as format from "../lib/format.js";

export const DEFAULTS = "Shown instead is what the page begins with.";
const COUNTED = { nodes: "Nodes", gpus: "GPUs per node" };

export function questionControls(ask, live) {
  let cluster = { nodes: 1, gpus: 8, accelerator: "H100" };
  const together = changed => {
    cluster = { ...cluster, ...changed };
    const lacks = Object.keys(COUNTED).find(name => cluster[name] === "");
    error.hidden = !lacks;
    if (lacks) { error.textContent = `${COUNTED[lacks]} is empty; give a whole number, 1 or more`; return; }
    ask("cluster", `${cluster.nodes}x${cluster.gpus}x${cluster.accelerator}`);
  };
  const off = !live;
  const model = select({ name: "model", label: "Model", onInput: value => ask("model", value) });
  const nodes = number({ name: "nodes", label: "Nodes", onInput: value => together({ nodes: value }) });
  const gpus = number({ name: "gpus", label: "GPUs per node", onInput: value => together({ gpus: value }) });
  const accelerator = select({ name: "accelerator", label: "Accelerator", onInput: value => together({ accelerator: value }) });
  const batch = number({ name: "batch", label: "Batch, sequences", onInput: value => ask("batch", value) });
  const seq = number({ name: "seq", label: "Sequence, tokens", onInput: value => ask("seq", value) });
  const precision = select({ name: "precision", label: "Precision", onInput: value => ask("precision", value) });
  const software = select({ name: "software", label: "Software", hint: "Software whose kernels and overlap to model", onInput: value => ask("software", value) });
  const about = element("p", { class: "dim small", "data-testid": "question" });
  const error = element("p", { class: "notice bad", role: "alert", hidden: true, "data-testid": "question-error" });
  const fields = [model, nodes, gpus, accelerator, batch, seq, precision, software];
  return {
    element: element("section", { class: "card stack", "aria-label": "The question" }, element("div", { class: "row", "data-testid": "asked" }, fields.map(field => field.element)), about, error),
    show({ question, choices }) {
      error.hidden = true;
      cluster = { nodes: question.nodes, gpus: question.gpus, accelerator: question.accelerator };
      model.set(choices.models.map(one => ({ value: one.name, text: `${one.name} (${format.si(one.parameters)})` })), question.model, { off });
      nodes.set(question.nodes, { off });
      gpus.set(question.gpus, { off });
      accelerator.set(choices.accelerators.map(one => ({ value: one.name, text: `${one.name} · ${(one.memory_bytes / 1e9).toFixed(1)} GB` })), question.accelerator, { off });
      batch.set(question.batch, { off });
      seq.set(question.seq, { off });
      precision.set(choices.precisions, question.precision, { off });
      software.set(choices.software, question.software, { off });
      const experts = question.experts ? ` (${format.si(question.active_parameters)} active, ${question.experts} experts)` : "";
      about.textContent = `${format.si(question.parameters, 4)} parameters${experts}, ${question.layers} layers · ${format.count(question.world)} GPU${question.world > 1 ? "s" : ""} · ` +
        `${format.si(question.batch * question.seq)} tokens a step · in a node ${question.links.inside.name}, between nodes ${question.links.across.name}`;
    },
    fail(problem, more = "") {
      error.replaceChildren(...problemText(problem, more));
      error.hidden = false;
    },
  };
}

const ZERO = ["nothing", "the optimizer", "optimizer and gradients", "optimizer, gradients and weights"];
const FIELDS = [
  ["dp", "dp · data", "Replicas, each with its own part of the batch"],
  ["tp", "tp · tensor", "Ranks that share every matrix"],
  ["pp", "pp · pipeline", "Ranks that share the layers"],
  ["cp", "cp · context", "Ranks that share every sequence"],
  ["ep", "ep · experts", "Ranks that experts are dealt out over"],
  ["zero", "ZeRO", "What is sharded over dp x cp: 1 optimizer, 2 + gradients, 3 + parameters"],
  ["replicate", "replicate", "Hybrid sharding: copies of the shards of ZeRO 3"],
  ["microbatches", "microbatches", "Per dp rank and step"],
  ["chunks", "chunks", "Stages per pipeline rank"],
];

export function layoutControls({ onMove, onGrab, onBest, live }) {
  const sliders = Object.fromEntries(FIELDS.map(([name, label, hint]) => [name, slider({
    name, label, hint, write: value => name === "zero" ? String(value) : format.count(value),
    onInput: value => onMove(name, value), onStart: onGrab,
  })]));
  const recompute = slider({ name: "recompute", label: "recompute", hint: "What the backward pass computes again", onInput: value => onMove("recompute", value), onStart: onGrab });
  const schedule = select({ name: "schedule", label: "Schedule of the pipeline", onInput: value => onMove("schedule", value) });
  const kind = select({ name: "cp_kind", label: "Kind of cp", onInput: value => onMove("cp_kind", value) });
  const dispatch = select({ name: "dispatch", label: "Tokens to experts", onInput: value => onMove("dispatch", value) });
  const sp = toggle({ name: "sp", label: "sequence parallelism (sp)", hint: "Norms and residual sharded over the sequence, along tp", onInput: value => onMove("sp", value) });
  let now = "";
  const text = element("p", { class: "boxed", "data-testid": "layout" });
  const best = button("Take the planner's choice", { class: "main", "data-testid": "take-best", disabled: true, onClick: onBest });
  const zero = element("p", { class: "dim small" });
  const order = ["dp", "tp", "pp", "cp", "ep", "zero", "replicate"];
  const whole = card("Layout", { "data-testid": "layout-card" },
    order.map(name => sliders[name].element), zero, sliders.microbatches.element, recompute.element, sp.element,
    element("div", { class: "row gap" }, schedule.element, kind.element, dispatch.element), sliders.chunks.element, text, best);
  return {
    element: whole,
    best(layout) {
      const taken = layout === now;
      best.disabled = !live || !layout || taken;
      best.textContent = taken ? "This is the planner's choice" : "Take the planner's choice";
      best.title = layout || "";
    },
    show({ wanted, shown, steps, problems, question }, hand, stale) {
      const { fields } = wanted, off = !live;
      for (const [name] of FIELDS) sliders[name].set(steps[name], fields[name], { off, bad: problems.length > 0 && name === hand, held: stale && name === hand });
      recompute.set(steps.recompute, fields.recompute, { off, bad: problems.length > 0 && hand === "recompute", held: stale && hand === "recompute" });
      sliders.ep.element.hidden = !question.experts;
      sliders.replicate.element.hidden = fields.zero !== 3;
      sliders.chunks.element.hidden = steps.chunks.length < 2 || fields.pp === 1;
      schedule.element.hidden = fields.pp === 1;
      kind.element.hidden = fields.cp === 1;
      dispatch.element.hidden = !question.experts || fields.ep === 1;
      schedule.set(steps.schedule, fields.schedule, { off });
      kind.set(steps.cp_kind, fields.cp_kind, { off });
      dispatch.set(steps.dispatch, fields.dispatch, { off });
      sp.set(fields.sp, { off: off || fields.tp === 1 });
      const over = fields.dp * fields.cp / fields.replicate;
      zero.textContent = !fields.zero || over > 1 ? `ZeRO ${fields.zero} shards ${ZERO[fields.zero]}${fields.zero ? ` over ${format.count(over)} ranks` : ""}` : `ZeRO ${fields.zero} has nothing to shard over: dp x cp is 1`;
      now = problems.length ? "" : shown.text;
      text.replaceChildren(layoutText(wanted.text));
    },
  };
}
