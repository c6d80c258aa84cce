// Light and dark as the system has it, or as the switch says.
import { keep, kept } from "./kept.js";

const KEY = "fivefold-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };

export function themeSwitch(button) {
  let now = kept(KEY) || "auto";
  const apply = () => {
    if (now === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = now;
    button.textContent = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[now];
  };
  button.addEventListener("click", () => {
    now = NEXT[now] || "auto";
    keep(KEY, now);
    apply();
  });
  apply();
}
