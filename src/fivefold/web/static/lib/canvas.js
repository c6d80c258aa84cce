// Pictures of thousands of shapes, on a canvas as wide as its box. What they show is also said in text beside them.
import { element } from "./dom.js";

const found = new Map(), painted = new Set();
let probe = null;

/** The colour that a variable or a mixture of style.css has now: colour("var(--blue)") -> "rgb(0, 114, 178)" */
export function colour(text) {
  if (!found.has(text)) {
    probe ||= document.body.appendChild(element("span", { hidden: true }));
    probe.style.color = text;
    found.set(text, getComputedStyle(probe).color);
  }
  return found.get(text);
}

/** Ink that can be read on a colour. */
export function inkOn(text) {
  const key = `ink on ${text}`;
  if (!found.has(key)) {
    const [r, g, b] = colour(text).match(/[\d.]+/g).map(Number).map(part => colour(text).startsWith("rgb") ? part / 255 : part);
    const [x, y, z] = [r, g, b].map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    found.set(key, 0.2126 * x + 0.7152 * y + 0.0722 * z > 0.179 ? "#000000" : "#ffffff");  // where both have 4.58 to 1
  }
  return found.get(key);
}

/** A text of SVG in the ink that can be read on its paper; without one, in the page's own. */
export function readable(text, paper) {
  if (paper) text.style.fill = inkOn(paper);
  return text;
}

function repaint() {
  found.clear();
  for (const one of painted) {
    if (one.element.isConnected) one.update();
    else painted.delete(one);
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new MutationObserver(repaint).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });

/** painting((context, width) => ..., { height: width => pixels, ...attributes }); `update()` paints again, soon. */
export function painting(draw, { height, ...attributes }) {
  const canvas = element("canvas", attributes), box = element("div", { class: "plot" }, canvas);
  let width = 0, waiting = false;
  const paint = () => {
    waiting = false;
    const high = width && height(width);
    if (!high) return;
    const sharp = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * sharp) || canvas.height !== Math.round(high * sharp)) {
      canvas.width = Math.round(width * sharp);
      canvas.height = Math.round(high * sharp);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${high}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(sharp, 0, 0, sharp, 0, 0);
    context.clearRect(0, 0, width, high);
    context.font = "12px system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif";
    draw(context, width, high);
  };
  const one = { element: box, canvas, update() { if (!waiting) { waiting = true; requestAnimationFrame(paint); } }, get width() { return width; } };
  new ResizeObserver(([entry]) => {
    const now = Math.floor(entry.contentRect.width);
    if (now && now !== width) { width = now; paint(); }
  }).observe(box);
  painted.add(one);
  return one;
}
