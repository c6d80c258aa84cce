// Every figure on the page is written here, in the units of the command line: decimal GB, s or ms, shares in percent.
const plain = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const count = value => plain.format(value);

/** 8030261248 -> "8.03B" */
export function si(value, digits = 3) {
  for (const [size, suffix] of [[1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${trimmed(value / size, digits)}${suffix}`;
  }
  return trimmed(value, digits);
}

function trimmed(value, digits) {
  const text = Math.abs(value) >= 1000 ? value.toFixed(0) : Number(value.toPrecision(digits)).toString();
  return text;
}

/** Bytes in decimal units: "64.3 GB", "812 MB" */
export function bytes(value) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (size >= unit) return `${digits3(value / unit)} ${name}`;
  }
  return `${value.toFixed(0)} B`;
}

/** Of memory, always in GB, so that parts can be compared: "1.26" */
export const gigabytes = value => (value / 1e9).toFixed(value < 99.5e9 ? 2 : 1);

/** "12.3 s", "456 ms" */
export const seconds = value => Math.abs(value) >= 1 ? `${digits3(value)} s` : `${digits3(value * 1e3)} ms`;

export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;

/** Three digits that count, without an exponent. */
export function digits3(value) {
  const size = Math.abs(value);
  if (size >= 100) return count(Math.round(value));
  return size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** "8.8 to 12.4 s", of [low, high]; empty where there is no range */
export function range(ends, write) {
  if (!ends) return "";
  const [low, high] = ends.map(end => write(end)), unit = /[^\d]+$/.exec(high)?.[0] || "";
  return `${unit.startsWith(" ") && low.endsWith(unit) ? low.slice(0, -unit.length) : low} to ${high}`;
}

/** +4.3%, −2.1% of a change; ×19.1 of a large one */
export const signed = (share, digits = 1) => share >= 2 ? `×${digits3(1 + share)}` : `${share < 0 ? "−" : "+"}${percent(Math.abs(share), digits)}`;

/** Of a schedule, in the unit in which its durations are given: at most four digits that count. */
export const time = value => Number(value.toPrecision(4)).toString();
