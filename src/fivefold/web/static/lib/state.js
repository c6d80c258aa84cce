// What a view shows stands in the address, so that it can be kept and sent: #plan?model=llama3-70b&layout=dp=8,tp=8
const latest = {};  // the hash of each view, as it was last shown

export function read() {
  const [view, query] = location.hash.replace(/^#/, "").split(/\?(.*)/s);
  if (query) latest[view] = location.hash;
  return { view, words: Object.fromEntries(new URLSearchParams(query || "")) };
}

/** Where a tab leads: to the view as it was left. */
export const address = view => latest[view] || `#${view}`;

/** The words with which another view was left: last("plan").layout */
export const last = view => Object.fromEntries(new URLSearchParams((latest[view] || "").split(/\?(.*)/s)[1] || ""));

/** A view was left with words that nobody can answer. */
export function forget(view) { delete latest[view]; }

/** Write a view's words. While a slider moves they replace each other; `push` makes a step that Back undoes. A view that
 * was left while its answer was on the way keeps its words for later, and the address stays that of the view that is shown. */
export function write(view, words, push = false) {
  const kept = Object.entries(words).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(kept).toString().replaceAll("%3D", "=").replaceAll("%2C", ",");
  const hash = `#${view}${query ? `?${query}` : ""}`;
  latest[view] = hash;
  const shown = location.hash.replace(/^#/, "").split("?")[0];
  if (hash === location.hash || (shown && shown !== view)) return;
  if (push) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}

/** Called when the user goes to another address: a link, Back, or a typed one. `write` does not call it. popstate comes
 * beside hashchange, and would ask everything twice. */
export function onChange(listener) {
  addEventListener("hashchange", listener);
  return () => removeEventListener("hashchange", listener);
}
