// One meaning, one colour, in all views. The variables are in style.css, for light and for dark; hues are those of the
// schedule's pictures (blue, sea green, orange, violet, slate) and others that stay apart without red and green cones.
const AXES = { dp: "green", tp: "orange", pp: "violet", cp: "sky", ep: "rose", zero: "gold", replicate: "gold", data: "green",
  batch: "green", world: "slate", ends: "violet", ezero: "gold", edp: "green", sequence: "sky", stage: "slate" };
const MEMORY = { parameters: "blue", gradients: "green", optimizer: "violet", "activations: residual": "orange",
  "activations: norm": "gold", "activations: attention": "gold", "activations: scores": "sand", "activations: mlp": "sand",
  "activations: head": "rose", "activations: experts": "rose", buffers: "sky", "context and fragmentation": "grey" };
const TIME = { gemm: "blue", attention: "sky", memory: "green", recompute: "violet", host: "grey", tp: "orange", cp: "gold",
  zero: "sand", ep: "rose", bubble: "grey", dp: "red", optimizer: "slate", other: "slate" };
const ACTIONS = { F: "blue", B: "green", I: "orange", W: "violet", S: "slate" };

const of = (table, name, usual) => `var(--${table[name] || usual})`;
export const axis = name => of(AXES, name, "slate");
export const memory = name => of(MEMORY, name, "rose");  // the worst moment of a step has many names
export const cause = name => of(TIME, name, "slate");
export const action = kind => of(ACTIONS, kind, "slate");
/** For runs and sources: the n-th of a list. */
export const nth = number => `var(--${["blue", "orange", "green", "violet", "rose", "gold", "sky", "slate", "red", "sand"][number % 10]})`;
