// The page of a data set: the map, the image that is selected, and the fixes that were suggested.

import { $, el, number, percent, short } from "./dom.js";
import { choices, colour, css } from "./map-colours.js";
import { takeHands } from "./map-hands.js";
import { ACCEPT, REJECT, Review } from "./map-review.js";
import { openStore } from "./map-store.js";
import { MapView } from "./map-view.js";
import { checkSize, complain, quietly, wireFiles, wireTheme } from "./page.js";

const SHOWN = 60; // fixes and images that are listed at once
let store;
let view;
let review;
let painted; // what colour() gave
let lit = null; // the value of the legend that is highlighted
let stop = new AbortController(); // of what was asked about the image that was selected before
let current = -1; // the fix that keys are about

const word = (column, value) => (value < 0 ? "none" : store.about.values[column][value]);
const name = (row) => store.names[row].slice(store.about.prefix);
const label = (row) => word("label", store.points.label[row]);
const said = (text) => { $("said").textContent = text; };

// --- thumbnails in lists -------------------------------------------------------------------------------

const waiting = new Set(); // thumbnails that wait for their sheet

function thumb(row, attributes = {}) {
  const { tile } = store.about;
  const canvas = el("canvas", { width: tile, height: tile, "aria-hidden": "true", ...attributes });
  if (row >= 0 && !drawThumb(canvas, row)) waiting.add({ canvas, row });
  return canvas;
}

function drawThumb(canvas, row) {
  const { tile, sheet_columns: columns } = store.about;
  const slot = store.points.slot[row];
  const sheet = store.sheets.take(Math.floor(slot / columns ** 2));
  if (!sheet) return false;
  const at = slot % columns ** 2;
  canvas.getContext("2d").drawImage(sheet, (at % columns) * tile, Math.floor(at / columns) * tile, tile, tile, 0, 0, tile, tile);
  return true;
}

function sheetArrived() {
  for (const one of waiting) if (!one.canvas.isConnected || drawThumb(one.canvas, one.row)) waiting.delete(one);
  view.arrived();
}

// --- the image that is selected ------------------------------------------------------------------------

function facts(row) {
  const { points } = store;
  const pairs = [["Name", name(row)], ["Split", word("split", points.split[row])]];
  if (store.about.values.label.length) pairs.splice(1, 0, ["Class", label(row)]);
  if (points.prediction && points.prediction[row] !== points.label[row]) pairs.push(["Neighbours say", el("span", { class: "bad" }, word("prediction", points.prediction[row]))]);
  for (const issue of review.issues) if (issue.row === row) pairs.push(["Issue", el("span", { class: "bad" }, describe(issue))]);
  return el("dl", { class: "about" }, ...pairs.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}

function nearList(title, found, own) {
  const items = found.map(({ row, similarity }) => {
    const other = own >= 0 && store.points.label[row] !== store.points.label[own];
    const words = `${name(row)}, ${label(row)}${similarity === undefined ? "" : `, similarity ${number(similarity)}`}`;
    return el("li", {}, el("button", { type: "button", class: other ? "other" : "", title: words, "aria-label": words, onclick: () => select(row, true) },
      thumb(row), el("span", {}, store.about.values.label.length ? label(row) : percent(similarity ?? 0))));
  });
  return [el("p", { class: "near-title" }, title), el("ul", { class: "near" }, ...items)];
}

function select(row, reveal = false) {
  stop.abort();
  stop = new AbortController();
  view.selected = row;
  view.marked = [];
  $("picked").dataset.row = String(row);
  if (row < 0) {
    $("picked-title").textContent = "Image";
    $("picked").replaceChildren(el("p", { class: "hint" }, "Choose an image on the map to see it with its nearest neighbours."));
    return view.draw();
  }
  $("picked-title").textContent = "Image";
  const photo = el("div", { class: "photo" }, thumb(row, { class: "small" }));
  const near = el("div", { class: "near-room", "aria-busy": "true" }, el("p", { class: "near-title" }, "Looking for neighbours …"));
  $("picked").replaceChildren(photo, facts(row), near);
  if (reveal) view.reveal(row);
  else view.draw();
  said(`${name(row)}, class ${label(row)}`);
  const { signal } = stop;
  if (store.image) quietly(showLarge(row, photo, signal));
  return quietly(showNeighbours(row, near, signal));
}

async function showLarge(row, photo, signal) {
  const url = URL.createObjectURL(await store.image(row, signal));
  if (signal.aborted) return URL.revokeObjectURL(url);
  const image = el("img", { src: url, alt: name(row) });
  image.addEventListener("load", () => {
    URL.revokeObjectURL(url);
    if (signal.aborted) return;
    const times = Math.min(8, Math.floor(200 / Math.max(image.naturalWidth, image.naturalHeight)));
    if (times > 1) { // a small image is shown in whole pixels
      image.style.width = `${times * image.naturalWidth}px`;
      image.style.imageRendering = "pixelated";
    }
    photo.replaceChildren(image);
  });
  return undefined;
}

async function showNeighbours(row, near, signal) {
  const found = await store.neighbours(row, signal);
  if (signal.aborted) return; // another image is selected by now
  near.replaceChildren(...nearList("Nearest neighbours", found, row));
  near.removeAttribute("aria-busy");
  view.marked = found.map((one) => one.row);
  settleLists();
}

function settleLists() {
  view.draw(); // asks for the sheets that lists wait for
  for (const { row } of waiting) store.sheets.take(Math.floor(store.points.slot[row] / store.about.sheet_columns ** 2));
  store.sheets.settle();
}

function showFound(title, found, more = []) {
  stop.abort();
  stop = new AbortController();
  view.selected = -1;
  view.marked = found.map((one) => one.row);
  $("picked-title").textContent = title;
  $("picked").dataset.row = "-1";
  $("picked").replaceChildren(...more, ...nearList("", found.slice(0, SHOWN), -1));
  settleLists();
}

async function search(blob) {
  if (!store.search) return;
  $("errors").replaceChildren();
  checkSize(blob, store.about.limits.max_bytes);
  stop.abort();
  const asked = stop = new AbortController();
  $("picked-title").textContent = "Searching …";
  const found = await store.search(blob, asked.signal);
  if (asked.signal.aborted) return;
  const url = URL.createObjectURL(blob);
  const image = el("img", { src: url, alt: "The image that was searched by" });
  image.addEventListener("load", () => URL.revokeObjectURL(url));
  showFound("Most alike", found, [el("div", { class: "photo" }, image)]);
  if (found.length) view.reveal(found[0].row);
  said(`${found.length} images found; the nearest is ${name(found[0].row)}, class ${label(found[0].row)}`);
}

function lassoed(rows) {
  setLasso(false);
  if (!rows.length) return select(-1);
  const counts = new Map();
  for (const row of rows) counts.set(label(row), (counts.get(label(row)) ?? 0) + 1);
  const ranked = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 8);
  const most = el("p", { class: "hint" }, ranked.map(([which, count]) => `${which} ${count}`).join(", "));
  const save = el("button", { class: "quiet", type: "button", onclick: () => download("selection.csv", listOf(rows)) }, "Export the list");
  showFound(`${rows.length.toLocaleString("en")} images`, rows.map((row) => ({ row })), [most, save]);
  return said(`${rows.length} images inside the lasso`);
}

const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
const listOf = (rows) => `path,label,split\r\n${rows.map((row) => `${[store.names[row], label(row), word("split", store.points.split[row])].map(cell).join(",")}\r\n`).join("")}`;

function download(file, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  el("a", { href: url, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// --- suggested fixes -----------------------------------------------------------------------------------

function describe({ issue, label: is, suggestion }) {
  if (issue === "label") return `${is} → ${suggestion}`;
  return suggestion ? `${issue}: ${suggestion}` : issue;
}

function ofKind() {
  const kind = $("kind").value;
  return review.issues.filter(({ issue }) => !kind || issue === kind);
}

function showReview() {
  const all = ofKind();
  const at = Math.max(0, all.findIndex(({ number: n }) => n === current));
  const first = Math.max(0, Math.min(at - Math.floor(SHOWN / 2), all.length - SHOWN));
  const verdicts = [...review.verdicts.values()];
  const accepted = verdicts.filter((verdict) => verdict === ACCEPT).length;
  $("tally").textContent = `${review.issues.length.toLocaleString("en")} suggested: ${accepted} accepted, ${verdicts.length - accepted} rejected, ${review.issues.length - verdicts.length} open`;
  $("undo").disabled = !review.steps.length;
  $("export").disabled = !accepted;
  const focused = document.activeElement?.dataset?.verdict;
  $("fixes").replaceChildren(...all.slice(first, first + SHOWN).map(fixLine));
  const line = $("fixes").querySelector('[aria-current="true"]');
  line?.scrollIntoView({ block: "nearest" });
  if (focused) line?.querySelector(`[data-verdict="${focused}"]`)?.focus({ preventScroll: true });
  settleLists();
}

function fixLine(fix) {
  const verdict = review.verdicts.get(fix.number);
  const button = (what, sign, verb) => el("button", {
    type: "button", "aria-pressed": String(verdict === what), "aria-label": `${verb} ${describe(fix)} of ${fix.path}`, title: verb, "data-verdict": what,
    onclick: () => {
      go(fix.number);
      decide(what);
    },
  }, sign);
  const see = el("button", { type: "button", onclick: () => go(fix.number), title: fix.path },
    thumb(fix.row), el("span", {}, el("b", {}, describe(fix)), el("small", {}, fix.row >= 0 ? name(fix.row) : fix.path)));
  return el("li", { class: "fix", "aria-current": String(fix.number === current) },
    el("span", { class: "see" }, see), el("span", { class: "verdict" }, button(ACCEPT, "✓", "Accept"), button(REJECT, "✕", "Reject")));
}

function go(fixNumber) {
  current = fixNumber;
  const { row } = review.issues[fixNumber];
  if (row >= 0 && view.selected !== row) select(row, true);
  showReview();
}

function step(by) {
  const all = ofKind();
  if (!all.length) return;
  const at = all.findIndex(({ number: n }) => n === current);
  go(all[at < 0 ? 0 : Math.max(0, Math.min(all.length - 1, at + by))].number);
}

function decide(verdict) {
  if (current < 0) return step(1);
  review.decide(current, verdict);
  const kept = review.verdicts.get(current) === verdict;
  said(`${kept ? `${verdict}ed` : "taken back"}: ${describe(review.issues[current])}`);
  return kept ? step(1) : showReview();
}

function undo() {
  const back = review.undo();
  if (back !== null) go(back);
}

// --- colours and highlights ----------------------------------------------------------------------------

function recolour() {
  painted = colour(store.about, store.points, $("colour").value);
  view.colours = painted.colours;
  highlight(null);
}

function highlight(value) {
  lit = value;
  const column = store.points[$("colour").value];
  view.lit = value === null ? null : Uint8Array.from(column, (one) => Number(one === value));
  showLegend();
  view.draw();
}

function showLegend() {
  const at = [...$("legend").children].indexOf(document.activeElement);
  if (painted.ramp) {
    const canvas = el("canvas", { width: 180, height: 1, "aria-hidden": "true" });
    const context = canvas.getContext("2d");
    for (let i = 0; i < 180; i++) {
      context.fillStyle = css(painted.ramp.at(i / 179));
      context.fillRect(i, 0, 1, 1);
    }
    return $("legend").replaceChildren(el("span", { class: "ramp" }, number(painted.ramp.low), canvas, number(painted.ramp.high)));
  }
  $("legend").replaceChildren(...painted.entries.map((entry) => {
    const dot = el("i", { "aria-hidden": "true" });
    dot.style.color = css(entry.colour);
    return el("button", { type: "button", "aria-pressed": String(lit === entry.value), onclick: () => highlight(lit === entry.value ? null : entry.value) },
      dot, entry.name, el("small", {}, short(entry.count)));
  }));
  if (at >= 0) $("legend").children[at]?.focus();
  return undefined;
}

// --- keys and wiring -----------------------------------------------------------------------------------

function hover(row, x, y) {
  if (row === view.hovered && row < 0) return;
  const changed = row !== view.hovered;
  view.hovered = row;
  $("tip").hidden = row < 0;
  if (row >= 0) {
    if (changed) $("tip").replaceChildren(thumb(row), el("div", {}, el("b", {}, label(row)), el("span", {}, name(row))));
    const left = x + 18 + 300 > view.w ? Math.max(0, x - 18 - $("tip").offsetWidth) : x + 18;
    $("tip").style.left = `${left}px`;
    $("tip").style.top = `${Math.min(y + 14, view.h - 90)}px`;
  }
  if (changed) view.draw();
}

function setLasso(on) {
  view.lassoing = on;
  $("lasso").setAttribute("aria-pressed", String(on));
  $("map").classList.toggle("lasso", on);
}

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function onMapKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrow = ARROWS[event.key];
  if (arrow && event.shiftKey) view.pan(-60 * arrow[0], -60 * arrow[1]);
  else if (arrow) {
    const from = view.selected >= 0 ? view.towards(view.selected, ...arrow) : view.at(view.w / 2, view.h / 2, Infinity);
    if (from >= 0) select(from, true);
  } else if (event.key === "+" || event.key === "=") view.zoom(1.5);
  else if (event.key === "-" || event.key === "_") view.zoom(1 / 1.5);
  else if (event.key === "0") view.fit();
  else return;
  event.preventDefault();
}

function onKey(event) {
  if (event.target.closest("input:not([type=checkbox]), select, textarea")) return;
  const key = event.key.toLowerCase();
  if ((event.ctrlKey || event.metaKey) && key === "z") {
    event.preventDefault();
    return undo();
  }
  if (event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const keys = { l: () => setLasso(!view.lassoing), escape: () => (view.lassoing ? setLasso(false) : select(-1)) };
  if (review.issues.length) Object.assign(keys, { n: () => step(1), p: () => step(-1), a: () => decide(ACCEPT), r: () => decide(REJECT), u: undo });
  return keys[key]?.();
}

function wire() {
  takeHands(view);
  $("map").addEventListener("keydown", onMapKey);
  addEventListener("keydown", onKey);
  $("colour").append(...choices(store.about).map(([column, title]) => el("option", { value: column }, title)));
  $("colour").addEventListener("change", recolour);
  $("images").addEventListener("change", () => {
    view.images = $("images").checked;
    view.draw();
  });
  $("lasso").addEventListener("click", () => setLasso(!view.lassoing));
  $("zoom-in").addEventListener("click", () => view.zoom(1.5));
  $("zoom-out").addEventListener("click", () => view.zoom(1 / 1.5));
  $("fit").addEventListener("click", () => view.fit());
  $("find-label").hidden = !store.search;
  if (store.search) wireFiles($("find"), search);
  wireTheme(() => view.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.draw());
  store.sheets.arrived = sheetArrived;
  store.sheets.failed = complain;
}

function wireReview() {
  $("review").hidden = !review.issues.length;
  if (!review.issues.length) return;
  const kinds = [...new Set(review.issues.map(({ issue }) => issue))];
  const count = (kind) => review.issues.filter(({ issue }) => issue === kind).length;
  $("kind").append(el("option", { value: "" }, `All kinds (${review.issues.length})`), ...kinds.map((kind) => el("option", { value: kind }, `${kind} (${count(kind)})`)));
  $("kind").addEventListener("change", () => {
    current = -1;
    showReview();
  });
  $("undo").addEventListener("click", undo);
  $("export").addEventListener("click", () => download("issues.csv", review.csv()));
  showReview();
}

async function start() {
  store = await openStore();
  const { about } = store;
  document.title = `${about.name} · vitkit`;
  $("to-model").hidden = !about.models?.length;
  const made = `${short(about.count)} images, features by ${about.model}, ${about.method}`;
  $("chips").append(el("li", {}, el("b", {}, about.name), el("small", {}, made)));
  review = new Review(store.issues, about.digest);
  view = new MapView($("map"), store, { pick: (row) => select(row), hover, lasso: lassoed });
  wire();
  recolour();
  wireReview();
  document.documentElement.dataset.ready = "true";
}

quietly(start());
