// The timeline: zoomed by wheel, buttons or keys; an action that is pointed at shows what it waits for.
import { painting } from "../lib/canvas.js";
import * as colours from "../lib/colours.js";
import { button } from "../lib/controls.js";
import { card, element } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { legend } from "../lib/plot.js";
import { heightOf, LEFT, paint, RIGHT, under } from "./schedule_paint.js";

const HELP = "Point at an action, or focus the picture and use the arrow keys; + and − zoom, 0 shows all.";

/** Who waits for whom, the other way round. */
function turned(lanes, needs) {
  const feeds = lanes.map(lane => lane.map(() => []));
  needs.forEach((lane, rank) => lane.forEach((reads, place) => reads.forEach(([r, k]) => feeds[r][k].push([rank, place]))));
  return feeds;
}

export function drawTimeline() {
  let payload = null, view = { from: 0, to: 1 }, chosen = null, pinned = false, feeds = null, drag = null;
  const picture = painting((context, width) => { if (payload?.drawn) paint(context, width, payload, view, chosen); }, {
    height: () => payload?.drawn ? heightOf(payload.drawn.lanes.length) : 0, tabindex: 0, role: "application", "data-testid": "timeline",
    "aria-roledescription": "timeline", "aria-describedby": "timeline-said" });
  const { canvas } = picture;
  canvas.classList.add("timeline");
  const title = element("h2", {}), said = element("p", { class: "boxed small", id: "timeline-said", "aria-live": "polite", "data-testid": "action" }, HELP), keys = element("div");
  const zooms = element("div", { class: "row" },
    button("−", { "aria-label": "Zoom out", "data-testid": "zoom-out", onClick: () => zoom(1.6) }),
    button("+", { "aria-label": "Zoom in", "data-testid": "zoom-in", onClick: () => zoom(1 / 1.6) }),
    button("Whole", { "data-testid": "zoom-whole", onClick: whole }));
  const box = element("section", { class: "card", "data-testid": "timeline-card" }, element("div", { class: "card-head" }, title, zooms), keys, picture.element, said);

  const length = () => payload.drawn.figures.makespan;
  function whole() { view = { from: 0, to: length() }; picture.update(); }
  function look(from, wide) {
    const size = Math.min(length(), Math.max(length() / 200, wide)), start = Math.max(0, Math.min(length() - size, from));
    view = { from: start, to: start + size };
    picture.update();
  }
  function zoom(factor, about = (chosen ? payload.drawn.lanes[chosen.rank][chosen.place][3] : (view.from + view.to) / 2)) {
    const middle = Math.max(view.from, Math.min(view.to, about)), share = (middle - view.from) / (view.to - view.from), wide = (view.to - view.from) * factor;
    look(middle - share * Math.min(wide, length()), wide);
  }

  const name = ([kind, stage, microbatch, , , other, otherStage, otherMicrobatch]) => other ? `${kind}${stage}.${microbatch}&${other}${otherStage}.${otherMicrobatch}` : `${kind}${stage}.${microbatch}`;
  const spoken = ([rank, place]) => { const one = payload.drawn.lanes[rank][place]; return `${name(one)} of rank ${rank} (ends at ${format.time(one[4])})`; };

  function choose(rank, place) {
    const { lanes, needs } = payload.drawn;
    feeds ||= turned(lanes, needs);
    if (chosen?.rank === rank && chosen.place === place) return;
    const reads = needs[rank][place], fed = feeds[rank][place], near = new Set([[rank, place], ...reads, ...fed].map(([r, k]) => `${r} ${k}`));
    if (place) near.add(`${rank} ${place - 1}`);
    if (place + 1 < lanes[rank].length) near.add(`${rank} ${place + 1}`);
    chosen = { rank, place, needs: reads, feeds: fed, near };
    const one = lanes[rank][place], before = place ? lanes[rank][place - 1] : null;
    const idle = one[3] - (before ? before[4] : 0);
    said.replaceChildren(element("strong", {}, name(one)), ` · ${payload.kinds[one[0]]} of stage ${one[1]}, microbatch ${one[2]}, on rank ${rank}, ${format.time(one[3])} to ${format.time(one[4])}. Waits for `,
      element("span", { class: "bad" }, [...reads.map(spoken), before ? `${name(before)} before it` : null].filter(Boolean).join(" and ") || "nothing"),
      idle > 1e-9 ? `; its rank is idle for ${format.time(idle)} before it. ` : ". ",
      "For it waits ", element("span", { class: "good" }, fed.map(at => `${name(lanes[at[0]][at[1]])} of rank ${at[0]}`).join(" and ") || "no other action"), ".");
    picture.update();
  }
  function unchoose() { chosen = null; pinned = false; said.textContent = HELP; picture.update(); }

  function nearest(rank, time) {
    const lane = payload.drawn.lanes[rank];
    let best = 0;
    lane.forEach((one, place) => { if (Math.abs((one[3] + one[4]) / 2 - time) < Math.abs((lane[best][3] + lane[best][4]) / 2 - time)) best = place; });
    return best;
  }
  function show(rank, place) {
    choose(rank, place);
    const [, , , start, end] = payload.drawn.lanes[rank][place];
    if (start < view.from || end > view.to) look((start + end - view.to + view.from) / 2, view.to - view.from);
  }

  canvas.addEventListener("pointermove", event => {
    if (!payload?.drawn) return;
    if (drag) { look(drag.from - (event.offsetX - drag.x) * (drag.to - drag.from) / (picture.width - LEFT - RIGHT), drag.to - drag.from); drag.moved = drag.moved || Math.abs(event.offsetX - drag.x) > 3; return; }
    if (pinned) return;
    const spot = under(event.offsetX, event.offsetY, picture.width, payload.drawn.lanes.length, view);
    const place = spot ? payload.drawn.lanes[spot.rank].findIndex(one => one[3] <= spot.time && spot.time < one[4]) : -1;
    if (place >= 0) choose(spot.rank, place);
    else if (chosen) unchoose();
  });
  canvas.addEventListener("pointerleave", () => { drag = null; if (!pinned && document.activeElement !== canvas) unchoose(); });
  canvas.addEventListener("pointerdown", event => { drag = { ...view, x: event.offsetX, moved: false }; });
  canvas.addEventListener("pointerup", event => {
    const moved = drag?.moved;
    drag = null;
    if (moved || !payload?.drawn) return;
    const spot = under(event.offsetX, event.offsetY, picture.width, payload.drawn.lanes.length, view);
    const place = spot ? payload.drawn.lanes[spot.rank].findIndex(one => one[3] <= spot.time && spot.time < one[4]) : -1;
    if (place < 0) { unchoose(); return; }
    choose(spot.rank, place);
    pinned = true;
  });
  canvas.addEventListener("wheel", event => {
    if (!payload?.drawn) return;
    const wide = view.to - view.from, all = wide >= length() * 0.999;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) { if (all) return; look(view.from + (event.deltaX || event.deltaY) * wide / 600, wide); }
    else if (event.deltaY > 0 && all) return;  // nothing to zoom out of: the page scrolls
    else zoom(Math.exp(event.deltaY / 400), under(event.offsetX, event.offsetY, picture.width, 1e9, view)?.time);
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", event => {
    if (!payload?.drawn) return;
    const { lanes } = payload.drawn, now = chosen || { rank: 0, place: -1 }, ranks = lanes.length;
    const middle = chosen ? (lanes[now.rank][now.place][3] + lanes[now.rank][now.place][4]) / 2 : 0;
    const keyed = {
      ArrowRight: () => show(now.rank, Math.min(lanes[now.rank].length - 1, now.place + 1)), ArrowLeft: () => show(now.rank, Math.max(0, now.place - 1)),
      ArrowDown: () => { const rank = Math.min(ranks - 1, now.rank + 1); show(rank, nearest(rank, middle)); }, ArrowUp: () => { const rank = Math.max(0, now.rank - 1); show(rank, nearest(rank, middle)); },
      Home: () => show(now.rank, 0), End: () => show(now.rank, lanes[now.rank].length - 1),
      "+": () => zoom(1 / 1.6), "=": () => zoom(1 / 1.6), "-": () => zoom(1.6), 0: whole, Escape: unchoose,
    }[event.key];
    if (!keyed || event.ctrlKey || event.metaKey) return;
    keyed();
    if (event.key.startsWith("Arrow") || event.key === "Home" || event.key === "End") pinned = true;
    event.preventDefault();
  });

  return {
    element: box,
    wait() { box.classList.add("busy"); },
    show(next) {
      const before = payload?.drawn, same = before && next.drawn && view.to - view.from < before.figures.makespan * 0.999;
      const share = same ? [view.from / before.figures.makespan, view.to / before.figures.makespan] : [0, 1];
      payload = next;
      chosen = null; pinned = false;
      box.classList.remove("busy");
      box.hidden = !next.drawn;
      if (!next.drawn) return;
      const { figures, lanes, chunk } = next.drawn;
      view = { from: share[0] * figures.makespan, to: share[1] * figures.makespan };
      feeds = null;
      title.textContent = `${figures.schedule}: ${figures.pp} ranks, ${figures.microbatches} microbatches`;
      canvas.setAttribute("aria-label", `Timeline of ${figures.schedule}, makespan ${format.time(figures.makespan)}, bubble ${format.percent(figures.bubble_makespan, 2)}, ${figures.pp} ranks`);
      const used = new Set();
      for (const lane of lanes) for (const one of lane) { used.add(one[0]); used.add(one[5]); }
      keys.replaceChildren(legend([...Object.entries(next.kinds).filter(([kind]) => used.has(kind)).map(([kind, text]) => ({ name: kind, text, colour: colours.action(kind[0]) })),
        ...(Math.max(...chunk) ? [{ name: "lighter", text: "later chunk of the rank", colour: colours.chunk("F", 1, 2) }] : []), { name: "idle", colour: "var(--track)" }]));
      said.textContent = HELP;
      picture.update();
    },
  };
}
