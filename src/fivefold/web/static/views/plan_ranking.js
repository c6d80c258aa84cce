// The layouts one change away, and the ranking of all: two rows of it can be compared.
import { button } from "../lib/controls.js";
import * as colours from "../lib/colours.js";
import { breakable, card, element, layoutText, problemText } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { legend, responsive, stackedBars } from "../lib/plot.js";
import { table } from "../lib/table.js";

export function drawNeighbours({ onTake, takes }) {
  const box = element("div", { "data-testid": "neighbours" }), advice = element("p", { class: "bad", "data-testid": "advice" });
  return {
    element: card("One change away, and why not", {}, advice, box),
    /** Those that are shown are another layout's. */
    wait(why = "") {
      advice.hidden = true;
      box.classList.toggle("busy", !why);
      box.replaceChildren(element("p", { class: "dim", "data-testid": "neighbours-wait" }, why || "The layouts one change away are being evaluated …"));
    },
    fail(error) { box.classList.remove("busy"); box.replaceChildren(element("p", { class: "dim" }, problemText(error))); },
    show({ neighbours, advice: said }) {
      box.classList.remove("busy");
      advice.replaceChildren(...breakable(said || ""));
      advice.hidden = !said;
      const ordered = [...neighbours].sort((a, b) => (a.slower === null) - (b.slower === null) || a.slower - b.slower);
      box.replaceChildren(table(["change", ">time", "what it does", ""], ordered.map(one => [
        element("span", { class: "mono" }, one.change),
        one.slower === null ? "—" : element("span", { class: one.slower < -0.001 ? "good" : "" }, format.signed(one.slower)),
        breakable(one.why.startsWith(one.change) ? one.why.slice(one.change.length).trim() : one.why),
        one.slower === null || !takes(one.layout) ? "" : button("Try", { "aria-label": `Try ${one.change}`, onClick: () => onTake(one.layout) }),
      ]), { testid: "neighbours-table", records: true }));
    },
  };
}

export function drawRanking({ onTake, takes }) {
  let answer = null, picked = [], current = "", lines = [];
  const said = element("span", { class: "dim small", "aria-live": "polite", "data-testid": "search-status" });
  const box = element("div"), versus = element("div");
  const whole = card("The best layouts", { aside: said, "data-testid": "ranking-card" }, box, versus);

  function pick(at) {
    picked = picked.includes(at) ? picked.filter(one => one !== at) : [...picked.slice(-1), at];
    draw();
  }

  function draw() {
    if (!answer) return;
    const rows = answer.options.map((one, at) => [
      element("input", { type: "checkbox", "aria-label": `Compare ${one.layout}`, "data-testid": `compare-${at}`, checked: picked.includes(at), onChange: () => pick(at) }),
      [layoutText(one.layout), one.layout === answer.best.layout && element("strong", { class: "good" }, " the choice")],
      format.seconds(one.step_seconds), format.count(Math.round(one.tokens_per_second_per_gpu)), format.percent(one.mfu), format.gigabytes(one.memory_bytes),
      format.percent(Math.max(0, one.time_by_cause.bubble) / one.step_seconds), takes(one.layout) ? button("Take", { "aria-label": `Take ${one.layout}`, onClick: () => onTake(one.layout) }) : "",
    ]);
    lines = [];
    box.replaceChildren(table(["", "layout", ">step", ">tok/s per GPU", ">MFU", ">GB", ">bubble", ""], rows, {
      testid: "ranking", records: true, caption: "Tick two to compare them. The choice is the simplest of those that are about as fast.",
      row(line, at) {
        line.classList.toggle("marked", picked.includes(at));
        line.classList.toggle("chosen", answer.options[at].layout === current);
        lines.push(line);
        line.addEventListener("click", event => { if (!event.target.closest("button, input")) pick(at); });
      },
    }));
    versus.replaceChildren(picked.length === 2 ? comparison(...picked.map(at => answer.options[at])) : "");
  }

  return {
    element: whole,
    wait() { answer = null; picked = []; said.textContent = "searching …"; box.classList.add("busy"); box.replaceChildren(element("p", { class: "dim" }, "The planner weighs the layouts of this question.")); versus.replaceChildren(); },
    fail(error) { box.classList.remove("busy"); said.textContent = ""; box.replaceChildren(element("p", { class: "notice bad", "data-testid": "search-error" }, problemText(error))); },
    mark(layout) {
      current = layout;
      if (answer) lines.forEach((line, at) => line.classList.toggle("chosen", answer.options[at].layout === current));
    },
    show(found) {
      answer = found;
      box.classList.remove("busy");
      said.textContent = `${format.count(found.weighed)} layouts evaluated, ${format.count(found.fitting)} fit`;
      draw();
    },
  };
}

const SHOWN = [
  ["step", one => one.step_seconds, format.seconds], ["tokens/s per GPU", one => one.tokens_per_second_per_gpu, value => format.count(Math.round(value))],
  ["MFU", one => one.mfu, format.percent], ["memory, GB", one => one.memory_bytes, format.gigabytes],
  ["sent in the node", one => one.traffic.reduce((sum, row) => sum + row.inside, 0), format.bytes],
  ["sent between nodes", one => one.traffic.reduce((sum, row) => sum + row.across, 0), format.bytes],
];

export function comparison(one, other) {
  const rows = SHOWN.map(([name, of, write]) => {
    const [a, b] = [of(one), of(other)];
    return [name, write(a), write(b), a ? format.signed(b / a - 1) : "—"];
  });
  const named = (values, colour) => legend([...new Set([one, other].flatMap(option => Object.entries(values(option)).filter(([, value]) => value > 0).map(([name]) => name)))].map(name => ({ name, colour: colour(name) })));
  const bars = (values, colour, write, label) => [responsive(width => stackedBars(width, {
    rows: [one, other].map((option, at) => ({ label: "AB"[at], parts: Object.entries(values(option)).map(([name, value]) => ({ name, value, colour: colour(name) })) })),
    height: 34, write, label, describe: (row, part) => [`${row.label}: ${part.name}`, write(part.value)],
  })).element, named(values, colour)];
  return element("div", { class: "stack compare", "data-testid": "comparison" },
    element("h3", {}, "Side by side"),
    element("p", {}, element("strong", {}, "A "), layoutText(one.layout)), element("p", {}, element("strong", {}, "B "), layoutText(other.layout)),
    element("div", { class: "grid2" },
      element("div", {}, element("h4", {}, "Time of a step"), bars(option => option.time_by_cause, colours.cause, format.seconds, "time of both")),
      element("div", {}, element("h4", {}, "Memory of the most loaded rank"), bars(option => option.memory_by_component, colours.memory, format.bytes, "memory of both"))),
    table(["", ">A", ">B", ">B against A"], rows, { testid: "comparison-table" }));
}
