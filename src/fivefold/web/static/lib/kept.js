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

/** Put a value down for the next page of this tab; without one, take what the last page put down. */
export function passOn(key, value) {
  try {
    const found = sessionStorage.getItem(key) || "";
    if (value) sessionStorage.setItem(key, value);
    else sessionStorage.removeItem(key);
    return found;
  } catch {
    return "";
  }
}
