// What the page keeps in this browser, for this origin. Where a browser keeps nothing, the page works all the same.
export function kept(key) {
  try {
    return localStorage.getItem(key) || "";
  } catch {
    return "";
  }
}

export function keep(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // A page from a file may have no storage.
  }
}
