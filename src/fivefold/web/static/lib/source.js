// Where a view's data comes from: the server of this page, or the page itself.
//
//   source.live                                    whether other questions can be asked: controls are off where not
//   source.plays, source.holds(words)              whether the page itself has answers to others, and to this one
//   await source.payload(words, { signal })        the view's payload
//   await source.part("search", words, { signal }) a part that takes longer
//
// A page that stands for itself has <script type="application/json" id="payload">:
//   {"views": [{"name", "title", "says", "payload": {...}, "parts": {"search": {...}}}]}

import { keep, kept, passOn } from "./kept.js";

const KEY = "fivefold-token";
// By this name the server knows a page, whose newer question replaces its older one. A reload keeps the name; a duplicate
// of a tab gets another, since the name lies in storage only while the page is away.
const PAGE = "fivefold-page";
const page = passOn(PAGE) || Array.from(crypto.getRandomValues(new Uint8Array(12)), byte => byte.toString(16).padStart(2, "0")).join("");
addEventListener("pagehide", () => passOn(PAGE, page));
addEventListener("pageshow", () => passOn(PAGE));

/** The token stands behind the # of the first address, which no server sees; it is kept for this origin and hidden. */
export function takeToken() {
  const found = /^#token=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  keep(KEY, found[1]);
  history.replaceState(null, "", location.pathname);
}

let asking = 0;  // questions under way, which a mark on the page tells of
function under(way) {
  asking += way;
  document.documentElement.toggleAttribute("data-asking", asking > 0);
}

async function ask(path, words, signal) {
  under(1);
  try {
    return await answered(path, words, signal);
  } finally {
    under(-1);
  }
}

async function answered(path, words, signal) {
  const query = new URLSearchParams(Object.entries(words || {}).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const address = `api${path}${query.size ? `?${query}` : ""}`;
  const headers = { Authorization: `Bearer ${kept(KEY)}`, "X-Page": page };
  let answer;
  try {
    answer = await fetch(address, { headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error("the server does not answer; is `fivefold ui` still running?"), { problems: [] });
  }
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error), { status: answer.status, problems: body.problems || [body.error] });
  return body;
}

export const listing = () => ask("", {});

export const live = name => ({
  live: true,
  plays: false,
  holds: () => true,
  payload: (words, { signal } = {}) => ask(`/${name}`, words, signal),
  part: (part, words, { signal } = {}) => ask(`/${name}/${part}`, words, signal),
});

/** A view of the page itself: its own answer, and those of `held`, of which the words in `by` make the key. */
export function frozen(view) {
  const { held } = view, keys = new Set(held?.keys || []);
  const key = words => held.by.map(name => words[name] ?? "").join(" ");
  const holds = words => Boolean(held) && keys.has(key(words));
  let answers = null;
  async function answer(words) {
    if (!holds(words)) return view;
    answers ||= unpacked(held.gzip);
    return (await answers)[key(words)] || view;
  }
  return {
    live: false,
    plays: Boolean(held),
    holds,
    payload: async words => ({ ...(await answer(words)).payload, ...held?.offers }),
    part: async (part, words) => {
      const { parts } = await answer(words);
      if (parts && part in parts) return parts[part];
      throw Object.assign(new Error("this file does not hold it"), { problems: [] });
    },
  };
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), sign => sign.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

/** The payload that the page itself holds; null on a page that a server serves. */
export function inline() {
  const held = document.getElementById("payload");
  return held ? JSON.parse(held.textContent) : null;
}

/** Asks for the newest words only: while one question is under way the others wait, and all but the last are dropped.
 *
 *   const asking = newest(words => source.payload(words), show, fail);
 *   asking(words);      // then show(answer, words, stale), stale where another answer is on its way
 */
export function newest(question, show, fail) {
  let waiting = null, busy = false;
  return async function next(words) {
    waiting = { words };
    if (busy) return;
    busy = true;
    while (waiting) {
      const { words: current } = waiting;
      waiting = null;
      try {
        const answer = await question(current);
        show(answer, current, waiting !== null);
      } catch (error) {
        if (error.name !== "AbortError" && error.status !== 409 && !waiting) fail(error, current);
      }
    }
    busy = false;
  };
}

/** For what takes longer: a newer question stops the older one. */
export function replacing(question, show, fail) {
  let controller = null;
  return async words => {
    if (controller) controller.abort();
    const mine = controller = new AbortController();
    try {
      const answer = await question(words, mine.signal);
      if (controller === mine) show(answer, words);
    } catch (error) {
      if (controller === mine && error.name !== "AbortError" && error.status !== 409) fail(error, words);
    }
  };
}
