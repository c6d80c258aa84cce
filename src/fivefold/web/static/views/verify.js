// Verify: what `verify --json` says. A report alone has this view: to prove a layout takes processes, and not a page.
import { card, element, layoutText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { table } from "../lib/table.js";

const KINDS = ["loss", "norm", "gradient", "parameter", "routing", "load", "bias"];
const error = value => value === null || value === undefined ? "—" : value === 0 ? "0" : value.toExponential(1);
const mark = holds => element("strong", { class: holds ? "good" : "bad" }, holds ? "ok" : "FAILS");
const calls = value => String(Number(value.toFixed(2)));
const figure = value => value === null ? "—" : value.toPrecision(10);

export function mount(root, source) {
  source.payload({}).then(payload => root.append(element("div", { class: "stack" },
    payload.sweep ? sweepCard(payload.sweep) : null, payload.proofs.map(proofCard))));
}

function sweepCard(sweep) {
  const rows = [...sweep.rows].sort((a, b) => a.passed - b.passed);
  return card("Layouts against one process", { "data-testid": "sweep" },
    element("p", { class: `notice ${sweep.passed ? "good" : "bad"}`, "data-testid": "sweep-verdict" },
      `${format.count(sweep.sampled)} of ${format.count(sweep.total)} layouts, ${format.percent(sweep.pairs_met, 0)} of all pairs of settings: ` +
      (sweep.failed ? `${format.count(sweep.failed)} fail` : "all passed")),
    table(["layout", "model", ">worst gradient", ">worst parameter", "traffic", "memory", ">time", ""],
      rows.map(one => [layoutText(one.layout), one.model, error(one.gradient), error(one.parameter), mark(one.traffic), mark(one.held), format.seconds(one.seconds), mark(one.passed)]),
      { testid: "sweep-table", records: true }));
}

function proofCard(proof) {
  return card(`${proof.variant || proof.model} in ${proof.dtype}`, { "data-testid": "proof" },
    element("p", {}, layoutText(proof.layout), " against one process"),
    element("div", { class: `notice gap ${proof.passed ? "good" : "bad"}`, "data-testid": "verdict" },
      proof.passed ? `It holds: every loss, gradient and parameter differs by at most ${error(proof.bound)}. ${format.seconds(proof.seconds)}.` : element("ul", {}, proof.problems.map(problem => element("li", {}, problem)))),
    !proof.passed && proof.details ? element("pre", { class: "mono scroll", tabindex: 0 }, proof.details) : null,
    comparisons(proof), element("div", { class: "grid2" }, sent(proof), held(proof)));
}

function comparisons(proof) {
  const pairs = (name, found) => found.map((pair, at) => [`${name}, step ${at + 1}`, figure(pair.layout), figure(pair.reference), ""]);
  const worst = KINDS.filter(kind => proof[`worst_${kind}`]).map(kind => {
    const one = proof[`worst_${kind}`];
    return [`worst ${kind}`, [one.name, one.name ? `, step ${one.step}` : `step ${one.step}`], one.note || error(one.error), mark(one.holds)];
  });
  return element("div", { class: "stack" },
    table(["", ">layout", ">one process", ""], [...pairs("loss", proof.losses), ...pairs("norm", proof.norms)], { testid: "losses", records: true }),
    table(["", "where", ">error", ""], worst, { testid: "worst", records: true, foot: ["tolerance", "", error(proof.bound), ""] }));
}

const sent = proof => element("div", {}, element("h3", {}, "Sent, per step"), table(["axis", "collective", ">calls", ">payload", ">expected", ""],
  proof.traffic_per_step.map(one => [one.axis, one.kind, calls(one.counted.calls), format.bytes(one.counted.payload),
    one.holds ? "the same" : `${calls(one.expected.calls)} calls, ${format.bytes(one.expected.payload)}`, mark(one.holds)]), { testid: "sent", records: true }));

function held(proof) {
  const write = (name, value) => name === "microbatches in flight" ? String(value) : format.bytes(value);
  return element("div", {}, element("h3", {}, "Held by a rank"), table(["", ">counted", ">expected", ""],
    proof.held.map(one => [one.holds ? one.name : `${one.name}, rank ${one.rank}`, write(one.name, one.counted), one.holds ? "the same" : write(one.name, one.expected), mark(one.holds)]), { testid: "held" }));
}
