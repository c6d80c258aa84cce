// One rank in words: where it stands, what it has of the model and of the batch, and whom it talks to.
import * as colours from "../lib/colours.js";
import { card, element } from "../lib/dom.js";
import * as format from "../lib/format.js";
import { swatch } from "../lib/plot.js";

const SHARDED = ["nothing: it updates all of its parameters", "the optimizer", "optimizer and gradients", "optimizer, gradients and weights"];
const span = ends => !ends.length ? "none" : ends[0] === ends[1] ? `number ${format.count(ends[0])}` : `${format.count(ends[0])} to ${format.count(ends[1])}`;
const some = ranks => ranks.length <= 8 ? ranks.join(", ") : `${ranks.slice(0, 6).join(", ")}, … ${ranks.at(-1)}`;

function facts({ part }) {
  const { of } = part, [shard, shards] = part.shards.fsdp, experts = part.shards.efsdp;
  const layers = part.stages.filter(one => one.layers.length).map(one => span(one.layers)).join(" and ");
  const ends = [part.stages.some(one => one.embedding) && "the embedding", part.stages.some(one => one.head) && "the head"].filter(Boolean);
  return [
    ["Layers", `${layers || "none"} of ${of.layers}${ends.length ? `, and ${ends.join(" and ")}` : ""}`, "layers"],
    ["Heads", `${span(part.heads)} of ${of.heads}`, "heads"],
    of.kv_heads !== of.heads && ["KV heads", `${span(part.kv_heads)} of ${of.kv_heads}`, "kv-heads"],
    of.experts > 0 && ["Experts", `${span(part.experts)} of ${of.experts} in a layer`, "experts"],
    ["Tokens", `${part.positions.map(span).join(" and ")} of ${format.count(of.positions)}`, "positions"],
    ["Sequences", `${span(part.sequences)} of ${format.count(of.sequences)}`, "sequences"],
    ["Parameters", `${format.si(part.parameters)} of ${format.si(of.parameters)}`, "parameters"],
    ["ZeRO", part.zero && shards > 1 ? `shard ${shard} of ${shards}: ${SHARDED[part.zero]}; it updates ${format.si(part.own)}` : part.zero ? `there is nobody to share with; it updates ${format.si(part.own)}` : SHARDED[0], "zero"],
    experts && part.zero > 0 && ["ZeRO, experts", experts[1] > 1 ? `shard ${experts[0]} of ${experts[1]}, over the ranks with the same experts` : "nobody else has these experts", "efsdp"],
  ].filter(Boolean);
}

export function drawRank() {
  const title = element("h2", { "data-testid": "rank" }), where = element("p", { class: "chips", "data-testid": "coordinates" });
  const list = element("dl", { class: "facts" }), groups = element("ul", { class: "groups", "data-testid": "groups" }), live = element("p", { class: "hidden-text", "aria-live": "polite" });
  return {
    element: element("section", { class: "card", "data-testid": "rank-card" }, element("div", { class: "card-head" }, title), where, list, element("h3", {}, "Talks to"), groups, live),
    show(chosen, map) {
      const { part } = chosen, node = chosen.node.number;
      title.textContent = `Rank ${format.count(part.rank)} · node ${format.count(node)}`;
      const wide = Object.entries(part.at).filter(([axis]) => map.axes.some(one => one.axis === axis));
      where.replaceChildren(...wide.map(([axis, at]) => element("span", { class: "chip" }, swatch(colours.axis(axis)), `${axis} ${at}`)));
      list.replaceChildren(...facts(chosen).flatMap(([name, text, testid]) => [element("dt", {}, name), element("dd", { "data-testid": `fact-${testid}` }, text)]));
      groups.replaceChildren(...Object.entries(chosen.groups).map(([axis, ranks]) => element("li", { "data-testid": `group-${axis}` }, swatch(colours.axis(axis)),
        element("strong", {}, axis), ` ${format.count(ranks.length)} ranks: `, element("span", { class: "dim" }, some(ranks)))));
      if (!groups.children.length) groups.append(element("li", {}, "nobody: there is one rank"));
      live.textContent = `Rank ${part.rank}, node ${node}: ${wide.map(([axis, at]) => `${axis} ${at}`).join(", ")}`;
    },
  };
}
