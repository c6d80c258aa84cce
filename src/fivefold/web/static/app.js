// The shell: finds the token or the inline payload, shows a tab for each view, and mounts the one that the address names.
import { breakable, element } from "./lib/dom.js";
import { settleInFrame } from "./lib/framed.js";
import { frozen, inline, live, listing, takeToken } from "./lib/source.js";
import * as state from "./lib/state.js";
import { themeSwitch } from "./lib/theme.js";

const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
let mounted = null;  // { name, unmount }
let of = "";  // what a page that stands for itself is about

function notice(sentence, kind = "bad") {
  main.replaceChildren(element("p", { class: `notice ${kind}`, role: "alert", "data-testid": "notice" }, sentence));
}

const colophon = ({ by, command, on }) => element("footer", { class: "colophon dim small", "data-testid": "made" },
  `Made by ${by} on ${on}${command ? ": " : ""}`, command && element("code", { class: "mono" },
    command.split(/(?<= )/).map(word => element("span", { class: word.length < 30 ? "line" : null }, breakable(word)))));  // an option does not break at its hyphens

async function show(views) {
  const named = state.read().view;
  const view = views.find(one => one.name === named) || views[0];
  for (const tab of tabs.children) {
    if (tab.dataset.view === view.name) {
      tab.setAttribute("aria-current", "page");
      tabs.scrollLeft = tab.offsetLeft - tabs.offsetLeft;  // many tabs; scrollIntoView would move where Tab begins
    } else tab.removeAttribute("aria-current");
  }
  if (mounted && mounted.name === view.name) return;
  if (mounted && mounted.unmount) mounted.unmount();
  document.title = [view.title, of, "Fivefold"].filter(Boolean).join(" · ");
  main.replaceChildren();
  const module = view.module || view.name;  // a file may have one view several times
  const root = main.appendChild(element("div", { class: `view view-${module}`, "data-testid": `view-${view.name}` }));
  mounted = { name: view.name, unmount: null };
  try {
    const { mount } = await import(`./views/${module}.js`);
    if (mounted.name === view.name) mounted.unmount = mount(root, view.source) || null;
  } catch (error) {
    console.error(error);
    notice(`The view ${view.title} could not be shown: ${error.message}`);
  }
}

async function start() {
  themeSwitch(document.getElementById("theme"));
  document.getElementById("skip").addEventListener("click", () => main.focus());
  const held = inline();
  let views;
  if (held) {
    views = held.views.map(view => ({ ...view, source: frozen(view) }));
    of = held.title || "";
    if (held.made) document.body.append(colophon(held.made));
    settleInFrame(views);
  } else {
    takeToken();
    try {
      views = (await listing()).views.map(view => ({ ...view, source: live(view.name) }));
    } catch (error) {
      notice(error.message);
      return;
    }
  }
  for (const view of views) {
    const tab = element("a", { href: `#${view.name}`, title: view.says, "data-view": view.name, "data-testid": `tab-${view.name}` }, view.title);
    tab.addEventListener("click", () => { tab.href = state.address(view.name); });
    tabs.append(tab);
  }
  state.onChange(() => show(views));
  show(views);
}

start();
