// One tooltip for the page. It repeats what tables and labels say, so that nobody needs a pointer.
import { element } from "./dom.js";

let box = null;

function place(x, y) {
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  box.style.top = `${y + 18 + height > innerHeight ? y - height - 12 : y + 18}px`;
}

/** tip(shape, () => "text" or [lines or elements]) */
export function tip(target, content) {
  const open = event => {
    box ||= document.body.appendChild(element("div", { class: "tooltip", role: "tooltip" }));
    const said = content();
    box.replaceChildren(...(Array.isArray(said) ? said : [said]).map(line => typeof line === "string" ? element("div", {}, line) : line));
    box.hidden = false;
    const around = target.getBoundingClientRect();
    place(event.clientX ?? around.left, event.clientY ?? around.bottom);
  };
  target.addEventListener("pointerenter", open);
  target.addEventListener("pointermove", event => box && place(event.clientX, event.clientY));
  target.addEventListener("pointerleave", hide);
  if (target instanceof HTMLElement || target.hasAttribute("tabindex")) {  // a listener alone would make shapes stops of the Tab key
    target.addEventListener("focus", open);
    target.addEventListener("blur", hide);
  }
  return target;
}

export function hide() {
  if (box) box.hidden = true;
}
