// The collectives of one layer, one after the other: played, paused or stepped through, and shown on the boards.
import * as colours from "../lib/colours.js";
import { button, slider } from "../lib/controls.js";
import { card, element, shape } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { responsive, swatch } from "../lib/plot.js";
import { table } from "../lib/table.js";
import { tip } from "../lib/tooltip.js";

const LENGTH = 1500;  // ms that a collective is shown
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** `onShow(sent or null, phase)`: which one is on its way, and how far, from 0 to 1; null where nothing may move. */
export function drawLayer({ onShow, onLayer, live }) {
  let layer = null, now = -1, playing = false, frame = 0, began = 0;
  const which = slider({ name: "layer", label: "Layer", hint: "Whose collectives are shown", onInput: onLayer });
  const play = button("Play", { class: "main", "data-testid": "play", onClick: () => playing ? pause() : start() });
  const controls = element("div", { class: "row" }, button("‹ Back", { "data-testid": "step-back", onClick: () => { pause(); go(now <= 0 ? layer.sent.length - 1 : now - 1); } }), play,
    button("Step ›", { "data-testid": "step", onClick: () => { pause(); go(now + 1); } }), button("Clear", { class: "quiet", onClick: () => { pause(); go(-1); } }));
  const said = element("p", { class: "boxed", "aria-live": "polite", "data-testid": "collective" }), rows = element("div");
  const strip = responsive(width => layer && drawStrip(width), { "data-testid": "strip" });
  const whole = card("One layer, collective by collective", { aside: controls, "data-testid": "layer-card" }, which.element, strip.element, said, rows);

  const sentence = one => `${one.when}: ${one.what}, ${one.calls > 1 ? `${one.calls} × ` : ""}${one.kind} of ${format.bytes(one.payload)} over ${one.group} (${one.ranks} ranks${one.across ? "" : " of one node"}): ` +
    `a rank sends ${format.bytes(one.wire)} over ${one.link}${one.seconds === null ? "" : `, ${format.seconds(one.seconds)} if nothing hides it`}`;

  function go(index) {
    now = index < 0 ? -1 : index % layer.sent.length;
    said.textContent = now < 0 ? `${layer.sent.length} collectives, in the order in which a microbatch meets them. Play them, or step through.` : `${now + 1} of ${layer.sent.length}, ${sentence(layer.sent[now])}.`;
    rows.querySelectorAll("tbody tr").forEach((row, at) => { row.classList.toggle("chosen", at === now); if (at === now) row.setAttribute("aria-current", "step"); else row.removeAttribute("aria-current"); });
    strip.update();
    onShow(now < 0 ? null : layer.sent[now], null);
  }

  function tick(time) {
    if (!playing) return;
    const gone = (time - began) / LENGTH;
    if (gone >= 1) { began = time; go(now + 1); }
    else if (!still.matches) onShow(layer.sent[now], gone);
    frame = requestAnimationFrame(tick);
  }
  function start() {
    if (!layer.sent.length) return;
    playing = true;
    play.textContent = "Pause";
    began = performance.now();
    if (now < 0) go(0);
    frame = requestAnimationFrame(tick);
  }
  function pause() {
    playing = false;
    cancelAnimationFrame(frame);
    play.textContent = "Play";
  }

  function drawStrip(width) {
    const { sent } = layer, time = one => one.seconds || 0, total = sent.reduce((sum, one) => sum + time(one), 0) || 1, least = 5;
    const room = Math.max(0, width - least * sent.length - 16), pieces = [];
    const ends = [];  // of the names in each line above the strip: one that would meet another stands a line higher
    let x = 0, before = "";
    const names = [];
    sent.forEach((one, at) => {
      if (one.when !== before) {
        if (before) x += 8;
        const cut = x + 6.3 * one.when.length > width;  // the last part may be short
        const from = cut ? width - 6.3 * one.when.length : x, above = ends.findIndex(end => end < from), line = above < 0 ? ends.length : above;
        ends[line] = from + 6.3 * one.when.length + 6;
        names.push([{ x: cut ? width : x, class: "tick", "text-anchor": cut ? "end" : "start" }, one.when, line]);
        before = one.when;
      }
      const wide = least + room * time(one) / total;
      pieces.push(tip(shape("rect", { x, y: 0, width: Math.max(2, wide - 1.5), height: 26, rx: 3, fill: colours.axis(one.group), opacity: now < 0 || now === at ? 1 : 0.4, stroke: now === at ? "var(--ink)" : null, "stroke-width": 2.5, onClick: () => { pause(); go(at); } }), () => sentence(one)));
      x += wide;
    });
    const top = 4 + 14 * ends.length;
    return shape("svg", { width, height: top + 32, role: "img", "aria-label": "Seconds of each collective, one after the other" },
      names.map(([attributes, name, line]) => shape("text", { ...attributes, y: top - 7 - 14 * line }, name)), shape("g", { transform: `translate(0 ${top})` }, pieces));
  }

  return {
    element: whole,
    show(next) {
      const same = layer && JSON.stringify(layer.sent) === JSON.stringify(next.sent);
      layer = next;
      which.set(Array.from({ length: next.layers }, (_, at) => at), next.number, { off: !live });
      if (same) { onShow(now < 0 ? null : layer.sent[now], null); return; }
      pause();
      rows.replaceChildren(next.sent.length ? table(["", "when", "axis", "what", ">bytes", ">a rank sends", "link", ">alone"],
        next.sent.map((one, at) => [button(String(at + 1), { class: "quiet tight", "data-testid": `collective-${at}`, "aria-label": `Show ${one.kind} of ${one.what}`, onClick: () => { pause(); go(at); } }), one.when,
          element("span", {}, swatch(colours.axis(one.group)), one.group), element("span", {}, element("strong", {}, one.kind), ` · ${one.what}`), `${one.calls > 1 ? `${one.calls} × ` : ""}${format.bytes(one.payload)}`, format.bytes(one.wire), one.link, one.seconds === null ? "" : format.seconds(one.seconds)]),
        { testid: "collectives", records: true }) : element("p", { class: "dim" }, "One rank sends nothing."));
      for (const one of controls.children) one.disabled = !next.sent.length;
      go(-1);
    },
    end: pause,
  };
}
