// Small helpers for building the page. Text is always set as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && typeof value !== "string") node[name] = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function bar(share) {
  const inner = el("u");
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("i", { "aria-hidden": "true" }, inner);
}

export const percent = (share) => {
  const value = share * 100;
  return `${value >= 99.95 ? 100 : value >= 10 ? value.toFixed(1) : value >= 0.1 ? value.toFixed(2) : value ? "<0.1" : "0"}%`;
};

export const capital = (text) => `${text[0].toUpperCase()}${text.slice(1)}`;

// A patch is called ROW,COLUMN, counted from 0, as in addresses, in `--query` and in the API.
export const patchName = (index, columns) => `patch ${Math.floor(index / columns)},${index % columns}`;

export const number = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

export function short(count) {
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= size) return `${(count / size).toPrecision(3)}${letter}`;
  }
  return String(count);
}

// Arrow keys, Home and End move among the parts of a group; returns the new index or null.
export function movedBy(key, index, count, columns = 1) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (!(key in steps)) return null;
  return Math.max(0, Math.min(count - 1, index + steps[key]));
}
