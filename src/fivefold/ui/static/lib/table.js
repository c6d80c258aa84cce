// Tables: heads as on the command line, where ">step" is aligned to the right.
import { element } from "./dom.js";

/** table([">GB", "name"], rows, { caption, testid, row: (tr, index) => ... }); a cell is text or an element */
export function table(heads, rows, { caption, testid, row, foot } = {}) {
  const right = heads.map(head => head.startsWith(">"));
  const cells = (values, tag) => values.map((value, at) => element(tag, { class: right[at] ? "right" : null, scope: tag === "th" ? "col" : null }, value));
  const body = rows.map((values, index) => {
    const line = element("tr", {}, cells(values, "td"));
    if (row) row(line, index);
    return line;
  });
  return element("div", { class: "scroll" }, element("table", { "data-testid": testid },
    caption && element("caption", {}, caption),
    element("thead", {}, element("tr", {}, cells(heads.map(head => head.replace(/^>/, "")), "th"))),
    element("tbody", {}, body),
    foot && element("tfoot", {}, element("tr", {}, cells(foot, "td")))));
}
