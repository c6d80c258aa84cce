// Accuracy in words and numbers: one row with all its cells, a line for each source, and the rows.
import { button } from "../lib/controls.js";
import { card, element, layoutText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { interval, responsive } from "../lib/plot.js";
import { table } from "../lib/table.js";
import { sign } from "./accuracy_scatter.js";

const MORE = 40;  // rows that are listed at a time
const NAMES = { gpu: "GPU", gpus: "GPUs", seq_len: "sequence", micro_batch: "microbatch", global_batch: "batch", zero_stage: "ZeRO", sequence_parallel: "sp", params_b: "params, B", step_time_s: "step, s", derived_step_time_s: "step, s, derived", tokens_per_s_per_gpu: "tokens/s per GPU", tflops_per_gpu: "TFLOP/s per GPU", mfu: "MFU, %", hfu: "HFU, %", peak_mem_gb: "peak memory, GB", url_or_path: "published", kv_heads: "kv heads", gpus_per_node: "GPUs of a node" };

const signedPercent = value => value === null || value === undefined ? "" : `${value < 0 ? "−" : "+"}${format.percent(Math.abs(value))}`;
const percent = value => value === null || value === undefined ? "" : format.percent(value);

/** The row in hand: what was measured and predicted, and its cells as they stand in the file. */
export function drawRow() {
  const box = element("div", { class: "stack", "data-testid": "row", "aria-live": "polite" });
  const whole = card("One run", { class: "card one" }, box);
  box.append(element("p", { class: "dim" }, "Point at a mark, or take a row of the table."));
  return {
    element: whole,
    show(row, texts, share) {
      const long = Object.fromEntries(Object.entries(row.long).map(([name, at]) => [name, texts[at]]));
      const figures = [["measured", row.measured_seconds && format.seconds(row.measured_seconds), "measured"], ["predicted", row.predicted_seconds && format.seconds(row.predicted_seconds), "predicted"],
        [`${format.percent(share, 0)} range`, format.range(row.predicted_range, format.seconds), "interval"], ["error", signedPercent(row.error), "error"],
        ["null model", row.null_seconds && `${format.seconds(row.null_seconds)}, ${signedPercent(row.null_seconds / row.measured_seconds - 1)}`, "null"],
        ["memory", row.memory_error !== null && row.measured_memory ? `${format.gigabytes(row.predicted_memory)} GB for ${format.gigabytes(row.measured_memory)}, ${signedPercent(row.memory_error)}` : "", "memory"]];
      box.replaceChildren(
        element("div", {}, element("strong", { "data-testid": "row-name" }, row.model), element("div", { class: "dim small" }, `${row.source}.csv line ${row.line}${row.software ? `; as ${row.software}` : ""}`)),
        row.layout ? layoutText(row.layout.split(",split=")[0], { "data-testid": "row-layout" }) : "",
        row.refused ? element("p", { class: "notice" }, `Not predicted: ${row.refused}.`) : row.status === "oom" ? element("p", { class: "notice" }, `It ran out of memory; the planner says that it ${row.fits ? "fits" : "does not fit"}.`) : "",
        element("dl", { class: "pairs" }, figures.filter(([, value]) => value).map(([name, value, id]) => element("div", {}, element("dt", {}, name), element("dd", { "data-testid": `row-${id}` }, value)))),
        row.predicted_range && row.measured_seconds ? gauge(row) : "",
        element("dl", { class: "pairs cells", "data-testid": "row-cells" }, Object.entries(row.cells).map(([name, value]) => element("div", {}, element("dt", {}, NAMES[name] || name), element("dd", {}, value)))),
        element("p", { class: "dim small wraps" }, [long.source, long.url_or_path].filter(Boolean).join("; ")),
        long.notes ? element("p", { class: "dim small wraps" }, long.notes) : "");
    },
  };
}

/** The predicted range as a bar, and the measured time as the mark on it. */
function gauge(row) {
  const most = Math.max(row.measured_seconds, row.predicted_range[1]) * 1.25;
  const inside = row.measured_seconds >= row.predicted_range[0] && row.measured_seconds <= row.predicted_range[1];
  return element("div", {}, responsive(width => interval(width, { value: row.measured_seconds, ends: row.predicted_range, most, label: "the measured time, and the predicted range" }), { class: "plot thin" }).element,
    element("p", { class: "small dim" }, `What was measured lies ${inside ? "inside" : "outside"} the predicted range.`));
}

const HEADS = "Error: mean absolute error of the step time. Null model: that of the best single hardware utilisation for each source. OOM right: rows whose fit is predicted correctly.";

/** A line for each source, dense models first; the button of one filters by it. */
export function sourceTable(lines, looks, chosen, onTake) {
  const cells = one => [
    [sign(looks.get(one.source)), onTake ? button(one.source, { class: "quiet link", "aria-pressed": String(chosen === one.source), "data-testid": `source-${one.source}`, onClick: () => onTake(one.source) }) : one.source],
    format.count(one.rows), format.count(one.timed), percent(one.mape), percent(one.median_ape), signedPercent(one.bias), percent(one.null_mape), one.worst ? signedPercent(one.worst.error) : "",
    one.memory_rows ? `${percent(one.memory_mape)} (${one.memory_rows})` : "", percent(one.oom_right)];
  const foot = (name, experts) => {
    const judged = lines.filter(one => one.judged && one.experts === experts), mean = of => judged.reduce((sum, one) => sum + of(one), 0) / judged.length;
    return [name, "", "", percent(mean(one => one.mape)), "", "", percent(mean(one => one.null_mape)), "", "", ""];
  };
  const dense = lines.filter(one => !one.experts), experts = lines.filter(one => one.experts);
  const heads = ["source", ">rows", ">timed", ">error", ">median", ">bias", ">null model", ">worst", ">memory error (rows)", ">OOM right"];
  const mark = several => (line, at) => line.classList.toggle("chosen", several[at].source === chosen);
  return element("div", { class: "stack" },
    dense.length ? table(heads, dense.map(cells), { testid: "sources", records: true, row: mark(dense), foot: dense.some(one => one.judged) ? foot("mean of sources", false) : null,
      caption: `Dense models. ${HEADS}` }) : "",
    experts.length ? table(heads, experts.map(cells), { testid: "sources-experts", records: true, row: mark(experts), foot: experts.some(one => one.judged) ? foot("mean of sources, experts", true) : null,
      caption: `Models with experts: lines of their own, which count for their mean from five rows on.${dense.length ? "" : ` ${HEADS}`}` }) : "");
}

const refusedLast = (a, b) => Number(Boolean(a.refused)) - Number(Boolean(b.refused));
const size = (row, none) => row.error === null || row.error === undefined ? none : Math.abs(row.error);
const ORDERS = {
  "largest error first": (a, b) => refusedLast(a, b) || size(b, -1) - size(a, -1),
  "smallest error first": (a, b) => refusedLast(a, b) || size(a, 1e9) - size(b, 1e9),
  "as published": (a, b) => a.source.localeCompare(b.source) || a.line - b.line,
};
export const orders = Object.keys(ORDERS);

export function rowTable(rows, { order, shown, at, onPick, onTake, onMore }) {
  const listed = [...rows].sort(ORDERS[order] || ORDERS[orders[0]]).slice(0, shown);
  return element("div", {}, table(["run", "model", "GPUs", "layout", ">measured", ">predicted", ">range", ">error", ">null model"], listed.map(row => [
    button(`${row.source}:${row.line}`, { class: "quiet link", "aria-label": `${row.source} line ${row.line}: show all of it`, onClick: () => onTake(row), onFocus: () => onPick(row) }), row.model, element("span", { class: "line" }, `${row.cells.gpus || ""} ${row.cells.gpu || ""}`),
    row.layout ? layoutText(row.layout.split(",split=")[0]) : row.refused ? element("span", { class: "dim small" }, row.refused) : "", row.status === "oom" ? "out of memory" : row.measured_seconds ? format.seconds(row.measured_seconds) : "", row.predicted_seconds ? format.seconds(row.predicted_seconds) : "",
    format.range(row.predicted_range, format.seconds), row.refused ? "refused" : signedPercent(row.error), row.null_seconds ? signedPercent(row.null_seconds / row.measured_seconds - 1) : ""]), {
    testid: "rows", records: true,
    row(line, index) {
      line.dataset.row = listed[index].key;
      line.classList.toggle("chosen", at?.key === listed[index].key);
      line.addEventListener("pointerenter", () => onPick(listed[index]));
    },
  }), rows.length > listed.length ? button(`Show ${Math.min(MORE, rows.length - listed.length)} more of ${format.count(rows.length)}`, { "data-testid": "more", onClick: () => onMore(shown + MORE) }) : "");
}
export const FIRST = MORE;
