// Makes elements and words for numbers. It knows nothing of what is shown.

export const $ = (id) => document.getElementById(id);
export const whole = (n) => Number(n).toLocaleString("en");
export const ms = (s) => (s * 1e3 < 10 ? (s * 1e3).toFixed(1) : whole(Math.round(s * 1e3)));
export const short = (n) => Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(n);
export const sum = (rows, key) => rows.reduce((total, row) => total + Number(row[key] || 0), 0);
export const ago = (s) => (s < 100 ? `${Math.round(s)} s` : s < 6000 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`);

export function quantile(values, p) {
  if (!values.length) return NaN;
  const sorted = [...values].sort((a, b) => a - b), rank = (sorted.length - 1) * p, low = Math.floor(rank);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (rank - low);
}

export function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const head = (names) =>
  element("thead", {}, element("tr", {}, ...names.map((text) => element("th", { textContent: text, scope: "col" }))));

export function fill(table, names, rows) {
  const cells = (row) => row.map((text) => element("td", { textContent: text }));
  table.replaceChildren(head(names), element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row)))));
}

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text; // else a screen reader says it again
}
