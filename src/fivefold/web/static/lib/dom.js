// Elements of HTML and SVG in one call each. Text is always text: nothing that a payload says is read as markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2).toLowerCase(), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) made.append(child);
  }
  return made;
}

/** element("p", { class: "dim", onClick: f }, "text", child) */
export const element = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** The same for SVG: shape("rect", { x: 0, fill: "var(--blue)" }) */
export const shape = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** A card with a heading: card("Memory", { id: "memory" }, ...children) */
export function card(title, attributes, ...children) {
  const { aside, ...others } = attributes || {};
  return element("section", { class: "card", ...others },
    element("div", { class: "card-head" }, element("h2", {}, title), aside), ...children);
}

/** The column beside an answer: it stays while the answer scrolls, also where it is taller than the window. */
export function side(...children) {
  const made = element("div", { class: "side stack" }, children);
  new ResizeObserver(() => made.style.setProperty("--tall", `${made.offsetHeight}px`)).observe(made);
  return made;
}

/** Text that may break after the commas of the layouts in it. */
export const breakable = text => String(text).split(/(?<=,)(?=\S)/).flatMap((piece, at) => at ? [element("wbr"), piece] : [piece]);

/** What was wrong, as the server said it, and what the page did about it. */
export function problemText(error, more = "") {
  const said = error.problems?.length ? error.problems.join(" · ") : error.message;
  return breakable(more ? `${said}${/[.?!]$/.test(said) ? "" : "."} ${more}` : said);
}

/** A layout as text that may break after its commas. */
export const layoutText = (text, attributes) => element("span", { class: "mono", ...attributes }, breakable(text));

let last = 0;
export const unique = prefix => `${prefix}-${++last}`;
