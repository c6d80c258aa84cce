// Controls that are real inputs: each is an object with `element` and `set(...)`, and calls back with its value. They are off
// until they have one.
import { element, unique } from "./dom.js";

/** A range over a list of steps: slider({ name: "tp", label: "tp", hint: "...", onInput }). set(steps, value, { bad, off }) */
export function slider({ name, label, hint, write = String, onInput, onStart }) {
  const id = unique(name);
  const output = element("output", { for: id, "data-testid": `${name}-value` });
  const input = element("input", { type: "range", id, min: 0, max: 0, step: 1, disabled: true, "data-testid": `slider-${name}`, title: hint });
  let steps = [];
  const value = () => steps[Number(input.value)];
  const say = () => {
    output.textContent = write(value());
    input.setAttribute("aria-valuetext", write(value()));
  };
  input.addEventListener("pointerdown", () => onStart && onStart(name));
  input.addEventListener("focus", () => onStart && onStart(name));
  input.addEventListener("input", () => { say(); onInput(value(), name); });
  const whole = element("div", { class: "slider", title: hint }, element("label", { for: id }, label), input, output);
  return {
    element: whole, input,
    set(legal, now, { bad = false, off = false, held = false } = {}) {
      steps = legal.includes(now) ? legal : [...legal, now].sort((a, b) => a - b);
      input.max = steps.length - 1;
      if (!held) input.value = steps.indexOf(now);
      input.disabled = off || steps.length < 2;
      whole.classList.toggle("bad", bad);
      input.setAttribute("aria-invalid", String(bad));
      say();
    },
  };
}

/** select({ name, label, onInput }). set([value or { value, text }], now, { off }) */
export function select({ name, label, hint, onInput }) {
  const id = unique(name);
  const input = element("select", { id, disabled: true, "data-testid": `select-${name}`, title: hint });
  input.addEventListener("change", () => onInput(input.value, name));
  let before = "";
  return {
    element: element("div", { class: "field" }, element("label", { for: id }, label), input), input,
    set(choices, now, { off = false } = {}) {
      const listed = choices.map(one => typeof one === "object" ? one : { value: String(one), text: String(one) });
      const signature = JSON.stringify(listed);
      if (signature !== before) input.replaceChildren(...listed.map(one => element("option", { value: one.value }, one.text)));
      before = signature;
      input.value = String(now);
      input.disabled = off;
    },
  };
}

/** A whole number: number({ name, label, onInput, min }). set(value, { off }) */
export function number({ name, label, hint, onInput, min = 1 }) {
  const id = unique(name);
  const input = element("input", { type: "number", id, min, step: 1, disabled: true, inputmode: "numeric", "data-testid": `number-${name}`, title: hint });
  input.addEventListener("change", () => onInput(input.value, name));
  return {
    element: element("div", { class: "field" }, element("label", { for: id }, label), input), input,
    set(value, { off = false } = {}) {
      if (document.activeElement !== input || input.value === "") input.value = value;
      input.disabled = off;
    },
  };
}

/** A checkbox: toggle({ name, label, onInput }). set(value, { off }) */
export function toggle({ name, label, hint, onInput }) {
  const id = unique(name);
  const input = element("input", { type: "checkbox", id, disabled: true, "data-testid": `toggle-${name}`, title: hint });
  input.addEventListener("change", () => onInput(input.checked, name));
  return {
    element: element("div", { class: "toggle" }, input, element("label", { for: id }, label)), input,
    set(value, { off = false } = {}) { input.checked = value; input.disabled = off; },
  };
}

export const button = (text, attributes) => element("button", { type: "button", ...attributes }, text);
