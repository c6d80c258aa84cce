// Tables: heads as on the command line, where ">step" is aligned to the right.
import { element } from "./dom.js";

/** table([">GB", "name"], rows, { caption, testid, foot, records, row: (tr, index) => ... }); a cell is text or an element.
 * With `records`, a narrow window shows each row as a record of its own: for tables with sentences or layouts in them, or many columns. There a head stands before numbers alone; before all cells
 * but the first where `records` is "named". */
export function table(heads, rows, { caption, testid, row, foot, records = false } = {}) {
  const names = heads.map(head => head.replace(/^>/, ""));
  const right = heads.map(head => head.startsWith(">"));
  const cells = (values, tag) => values.map((value, at) => element(tag, { class: right[at] ? "right" : null, scope: tag === "th" ? "col" : null, "data-head": records && tag === "td" ? names[at] : null }, value));
  const body = rows.map((values, index) => {
    const line = element("tr", {}, cells(values, "td"));
    if (row) row(line, index);
    return line;
  });
  return element("div", { class: "scroll" }, element("table", { "data-testid": testid, class: records ? `records ${records}` : null },
    caption && element("caption", {}, element("span", {}, caption)),
    element("thead", {}, element("tr", {}, cells(names, "th"))),
    element("tbody", {}, body),
    foot && element("tfoot", {}, element("tr", {}, cells(foot, "td")))));
}
