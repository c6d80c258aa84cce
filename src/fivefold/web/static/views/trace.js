// Trace: the ranks of a traced step, measured over simulated. A report alone has this view: to trace takes processes.
import { element } from "../lib/dom.js";
import { drawTrace } from "./run_trace.js";

export function mount(root, source) {
  const trace = drawTrace({ onStep() {}, live: false });
  root.append(element("div", { class: "stack" }, trace.element));
  source.payload({}).then(payload => trace.show(payload));
}
