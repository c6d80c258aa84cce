// One meaning, one colour, in all views and as in the pictures of the command line (planner/pictures.py, schedules/draw.py). The
// names are variables of style.css.
const softer = (name, share = 50) => `color-mix(in srgb, var(--${name}) ${100 - share}%, white)`;
const plain = name => `var(--${name})`;

const AXES = { tp: "orange", cp: "purple", pp: "blue", dp: "green", ep: "red", replicate: "sky", shard: "sky", fsdp: "sky", efsdp: "sky",
  expert_dp: "green", dp_cp: "green", batch: "green", embedding: "blue", cp_tp: "purple" };
// Compute is blue and green, communication warm, waiting grey.
const CAUSES = { gemm: plain("blue"), attention: plain("sky"), memory: plain("green"), recompute: softer("green"), host: plain("rest"),
  tp: plain("orange"), cp: softer("orange"), zero: softer("red"), ep: plain("purple"), bubble: plain("grey"), dp: plain("red"),
  optimizer: "light-dark(color-mix(in srgb, var(--blue), black), var(--ink))", other: plain("rest") };
const MEMORY = { parameters: "blue", gradients: "orange", optimizer: "green", buffers: "sky", "context and fragmentation": "rest" };
const KINDS = ["residual", "norm", "attention", "scores", "mlp", "head", "experts"];  // of activations, ever lighter
const ACTIONS = { F: "blue", B: "green", I: "orange", W: "purple", S: "slate" };
const ORDER = ["blue", "orange", "green", "purple", "sky", "red"];

export const axis = name => plain(AXES[name] || "slate");
/** A rank's place along an axis: 0 is darkest, as in planner/mesh_picture.py. */
export const shade = (name, place, ranks) => softer(AXES[name] || "slate", Math.round(72 * place / Math.max(1, ranks - 1)));
export const cause = name => CAUSES[name] || plain("slate");
export const action = kind => plain(ACTIONS[kind] || "slate");
/** Of an action in a chunk: full for the first, lighter chunk by chunk, as in schedules/palette.py. */
export const chunk = (kind, number, chunks) => softer(ACTIONS[kind] || "slate", chunks > 1 ? Math.round(68 * number / (chunks - 1)) : 0);
/** A component of memory; the worst moment of a step, which has many names, is red. */
export function memory(name) {
  const kind = KINDS.indexOf(name.replace("activations: ", ""));
  return kind >= 0 ? softer("purple", 11 * kind) : plain(MEMORY[name] || "red");
}
/** For runs and sources: the n-th of a list; after six they become lighter. */
export const nth = number => softer(ORDER[number % 6], 45 * (Math.floor(number / 6) % 2));
export const INSIDE = plain("blue"), ACROSS = plain("orange");  // links within a node, and between nodes
