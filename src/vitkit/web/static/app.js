// The page: which image, what is shown of it, and the parts that show it.

import { explain, file, fromDataUrl, get, post } from "./api.js";
import { loadColours, paint } from "./colours.js";
import { $, bar, el, movedBy, number, percent, short } from "./dom.js";
import { Look } from "./look.js";
import { checkSize, complain, quietly, wireFiles, wireTheme } from "./page.js";
import * as panels from "./panels.js";
import { Stage } from "./stage.js";
import { onChange, readAddress, set, state } from "./state.js";
import { Strip } from "./strip.js";

const EXAMPLES = { cat: "a cat", boat: "a sailing boat", flower: "a sunflower", three: "a handwritten three", eight: "a handwritten eight" };
const WORDS = {
  attention: "What a layer's output attends to. Point at a patch to see what that patch attends to.",
  rollout: "Attention multiplied through the layers up to this one: how much of each patch has reached the output.",
  relevance: "attention weighted by its gradient, through all layers.",
  gradcam: "the last patch states weighted by their gradient.",
};
// What the model's outputs are called, and what a map of one of them shows.
const OUTPUTS = {
  classes: { one: "class", many: "classes", speaks: "speaks for" },
  labels: { one: "label", many: "labels", speaks: "speaks for" },
  values: { one: "value", many: "values", speaks: "raises" },
};
const models = [];
let looks = []; // one for each model
let stages = [];
let hovered = null; // { stage, patch } under the pointer
let turn = 0; // counts images, so that a late answer of an earlier one is not shown
let timer = null;

// --- an image comes in ------------------------------------------------------------------------------

async function open(blob, example = "") {
  $("errors").replaceChildren();
  checkSize(blob, models[0].limits.max_bytes);
  const mine = ++turn;
  document.querySelectorAll(".frame").forEach((frame) => frame.classList.add("waiting"));
  try {
    const opened = await Promise.all(models.map((model) => lookAt(model, blob)));
    if (mine !== turn) return opened.forEach((look) => look.close());
    looks.forEach((look) => look.close());
    looks = opened;
    hovered = null;
    set({ example, class: "", other: "", patch: "" });
    render();
    looks.forEach((look) => look.model.explainable && quietly(look.ahead(state.method, layerOf(look))));
  } finally {
    if (mine === turn) document.querySelectorAll(".frame").forEach((frame) => frame.classList.remove("waiting"));
  }
}

async function lookAt(model, blob) {
  const answer = await post("predict", { model: model.name, top: "5", image: "true" }, blob);
  const { predictions } = await answer.json();
  const png = fromDataUrl(predictions[0].picture);
  const { classes, values } = predictions[0];
  const ranked = values ? values.map((value, i) => ({ class: i, ...value })) : classes;
  return new Look(model, png, await createImageBitmap(png), ranked, schedule, complain);
}

async function openExample(name) {
  await open(await file(`example-${name}.webp`), name);
}

// --- what is asked for -------------------------------------------------------------------------------

const terms = (model) => OUTPUTS[model.outputs.kind];
const capital = (text) => `${text[0].toUpperCase()}${text.slice(1)}`;
const byClass = () => state.method === "relevance" || state.method === "gradcam";
const layerOf = (look) => Math.min(state.layer === "" ? look.model.depth - 1 : Number(state.layer), look.model.depth - 1);
const headOf = (look) => (state.method === "rollout" || Number(state.head) >= look.model.heads ? "mean" : state.head);

function classOf(look) {
  if (look !== looks[0]) { // the class of the same name, or what this model thinks itself
    const name = looks[0].model.outputs.names[classOf(looks[0])];
    const same = look.model.outputs.names.indexOf(name);
    return same >= 0 && look.model.outputs.names.length === looks[0].model.outputs.names.length ? same : look.ranked[0]?.class;
  }
  return state.class !== "" && Number(state.class) < look.model.outputs.names.length ? Number(state.class) : look.ranked[0]?.class;
}

function otherClass(look) {
  const first = classOf(look);
  if (state.other !== "" && Number(state.other) < look.model.outputs.names.length) return Number(state.other);
  return (look.ranked.find((rank) => rank.class !== first) ?? look.ranked[0])?.class;
}

// The patch that is asked, in the grid of `look`: the one pointed at, else the one chosen; null is the output.
function patchOf(look) {
  let at = null;
  if (hovered && hovered.patch !== null) at = place(hovered.stage.look, hovered.patch);
  else if (state.patch) {
    const [row, column] = state.patch.split(",").map(Number);
    at = place(looks[0], Math.min(row, looks[0].h - 1) * looks[0].w + Math.min(column, looks[0].w - 1));
  }
  if (!at) return null;
  return Math.min(look.h - 1, Math.floor(at[0] * look.h)) * look.w + Math.min(look.w - 1, Math.floor(at[1] * look.w));
}

const place = (look, patch) => [(Math.floor(patch / look.w) + 0.5) / look.h, ((patch % look.w) + 0.5) / look.w];

function views() {
  if (!looks.length) return [];
  const [first, second] = looks;
  if (state.versus === "model" && second) return [first, second].map((look) => ({ look, cls: classOf(look) }));
  if (state.versus === "class" && byClass()) return [classOf(first), otherClass(first)].map((cls) => ({ look: first, cls }));
  return [{ look: first, cls: classOf(first) }];
}

// --- showing it --------------------------------------------------------------------------------------

let waiting = false;
function schedule() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    render();
  });
}

function render() {
  showTab();
  showControls();
  showRanks();
  const shown = views();
  while (stages.length > shown.length) stages.pop().remove();
  while (stages.length < shown.length) stages.push(new Stage($("stages"), { hover, pick, key }));
  $("stages").classList.toggle("two", shown.length === 2);
  shown.forEach((view, i) => showStage(stages[i], view, shown.length === 2));
  $("strips").hidden = !models[0].explainable;
  if (shown.length && shown[0].look.model.explainable) showStrips(shown[0]);
}

function question(view) {
  const patch = byClass() ? null : patchOf(view.look);
  return { method: state.method, layer: layerOf(view.look), head: headOf(view.look), patch, cls: view.cls };
}

function showStage(stage, view, two) {
  const { look } = view;
  stage.show(look);
  const asked = look.model.explainable ? question(view) : null;
  const values = asked && look.map(asked);
  const pointed = look.model.explainable ? patchOf(look) : null;
  const className = view.cls === undefined ? "" : look.model.outputs.names[view.cls];
  stage.title.textContent = byClass() && className ? className : two || models.length > 1 ? look.model.name : "What the model sees";
  stage.note.textContent = two && state.versus === "model" && byClass() ? look.model.name : `${look.bitmap.width} × ${look.bitmap.height} pixels`;
  stage.frame.classList.toggle("waiting", Boolean(asked && !values && !(byClass() && !look.ranked.length)));
  stage.free.hidden = !state.patch || byClass();
  stage.draw({
    values, strength: Number(state.strength) / 100, smooth: state.smooth === "1", grid: state.grid === "1",
    patch: pointed, pinned: Boolean(state.patch) && !(hovered && hovered.patch !== null),
  });
  if (values) stage.words.replaceChildren(...describe(look, asked, values, pointed));
  else if (!look.model.explainable) stage.words.textContent = "This model has no attention to look at.";
}

const strongest = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);

function describe(look, { layer, head, patch, method }, values, pointed) {
  const name = (index) => `row ${Math.floor(index / look.w) + 1}, column ${(index % look.w) + 1}`;
  if (byClass()) {
    const total = values.reduce((a, b) => a + b, 0);
    if (!total) return [`Nothing in the image ${terms(look.model).speaks} this ${terms(look.model).one}: the map is zero everywhere.`];
    const at = pointed ?? strongest(values);
    return [pointed === null ? "Most at " : "", el("b", {}, name(at)), `: ${percent(values[at] / total)} of the whole map`];
  }
  const who = patch === null ? (look.model.pooling === "cls" ? "The class token" : "The output") : name(patch);
  const where = method === "rollout" ? `up to layer ${layer + 1}` : `in layer ${layer + 1}, ${head === "mean" ? "mean of the heads" : `head ${Number(head) + 1}`}`;
  const most = strongest(values);
  return [el("b", {}, capital(who)), ` attends most to ${most === patch ? "itself" : name(most)} (${percent(values[most])}) ${where}`];
}

const layerStrip = new Strip($("layer-strip"), (i) => {
  stop();
  set(byClass() ? { class: looks[0].ranked[i].class } : { layer: i });
});
const headStrip = new Strip($("head-strip"), (i) => set({ head: i ? i - 1 : "mean" }));

function showStrips(view) {
  const { look } = view;
  const asked = question(view);
  $("play").hidden = byClass();
  $("heads-part").hidden = state.method !== "attention";
  $("layer-strip").classList.toggle("words", byClass());
  for (const id of ["layer-strip", "head-strip"]) $(id).classList.toggle("smooth", state.smooth === "1");
  if (byClass()) {
    stop();
    $("layers-title").textContent = capital(terms(look.model).one);
    const names = look.ranked.map((rank) => rank.name);
    const maps = look.ranked.map((rank) => look.map({ ...asked, cls: rank.class }, false));
    return layerStrip.show(names, names, maps, look.h, look.w, look.ranked.findIndex((rank) => rank.class === view.cls));
  }
  const { depth, heads } = look.model;
  const layers = Array.from({ length: depth }, (_, i) => i);
  const maps = layers.map((layer) => look.map({ ...asked, layer }, false));
  layerStrip.show(layers.map((i) => String(i + 1)), layers.map((i) => `Layer ${i + 1}`), maps, look.h, look.w, asked.layer);
  layerStrip.reveal();
  $("layers-title").textContent = state.method === "rollout" ? "Rolled out up to layer" : "Layer";
  const of = ["mean", ...Array.from({ length: heads }, (_, i) => String(i))];
  const names = of.map((head) => (head === "mean" ? "Mean of the heads" : `Head ${Number(head) + 1}`));
  const labels = of.map((head) => (head === "mean" ? "mean" : String(Number(head) + 1)));
  if (state.method === "attention") headStrip.show(labels, names, of.map((head) => look.map({ ...asked, head }, false)), look.h, look.w, of.indexOf(asked.head));
  return undefined;
}

function showRanks() {
  const key = JSON.stringify([looks.map((look) => look.ranked), state.versus, byClass(), state.class, state.other, turn]);
  if (key === showRanks.key) return;
  showRanks.key = key;
  const shown = looks.filter((look, i) => !i || state.versus === "model");
  const focused = [...$("ranks").querySelectorAll("button")].indexOf(document.activeElement);
  $("ranks").replaceChildren(...shown.flatMap(ranksOf), ...hintsOf(shown));
  if (focused >= 0) $("ranks").querySelectorAll("button")[focused]?.focus();
}

function ranksOf(look) {
  const title = models.length > 1 ? [el("p", { class: "rank-model" }, look.model.name)] : [];
  if (!look.ranked.length) return [...title, el("p", { class: "hint" }, "This model has no classifier.")];
  const chosen = byClass() ? classOf(look) : null;
  const other = byClass() && state.versus === "class" && look === looks[0] ? otherClass(look) : null;
  return [...title, ...look.ranked.map((rank) => {
    const parts = "value" in rank ? [el("span", {}, rank.name), el("b", {}, number(rank.value))]
      : [el("span", {}, rank.name), el("b", {}, percent(rank.probability)), bar(rank.probability)];
    if (!look.model.explainable) return el("div", { class: "rank" }, ...parts);
    return el("button", {
      class: rank.class === other ? "rank second" : "rank", type: "button", "aria-pressed": String(rank.class === chosen || rank.class === other),
      onclick: () => choose(look, rank.class),
    }, ...parts);
  })];
}

// What a click on a prediction shows; nothing where there is no classifier or no attention.
function hintsOf(shown) {
  const model = shown.find((look) => look.model.explainable && look.ranked.length)?.model;
  return model ? [el("p", { class: "hint" }, `Click a ${terms(model).one} to see what ${terms(model).speaks} it.`)] : [];
}

function choose(look, cls) {
  const method = byClass() ? state.method : "relevance";
  const name = look.model.outputs.names[cls];
  const own = look === looks[0] ? cls : looks[0].model.outputs.names.indexOf(name);
  if (own >= 0) set({ method, class: own });
  else set({ method });
}

function showControls() {
  const model = models[0];
  for (const input of document.querySelectorAll("#methods input")) {
    input.checked = input.value === state.method;
    input.disabled = !model.explainable || (!model.outputs.names.length && (input.value === "relevance" || input.value === "gradcam"));
  }
  const shows = byClass() ? `What ${terms(model).speaks} a ${terms(model).one}: ` : "";
  $("method-words").textContent = model.explainable ? shows + WORDS[state.method] : "A model without attention has predictions only.";
  $("class-field").hidden = !byClass();
  $("other-field").hidden = !(byClass() && state.versus === "class");
  $("versus").value = state.versus;
  $("strength").value = state.strength;
  $("strength-value").textContent = `${state.strength}%`;
  $("grid").checked = state.grid === "1";
  $("smooth").checked = state.smooth === "1";
  if (!looks.length) return;
  fillClasses($("class"), looks[0], classOf(looks[0]));
  fillClasses($("other"), looks[0], otherClass(looks[0]));
  for (const button of $("examples").children) button.setAttribute("aria-pressed", String(button.dataset.name === state.example));
}

function fillClasses(select, look, chosen) {
  if (select.look !== look) {
    select.look = look;
    const option = (cls) => el("option", { value: String(cls) }, look.model.outputs.names[cls]);
    const likely = el("optgroup", { label: "Likeliest" }, ...look.ranked.map((rank) => option(rank.class)));
    const all = el("optgroup", { label: "All" }, ...look.model.outputs.names.map((_, cls) => option(cls)));
    select.replaceChildren(...(look.model.outputs.kind === "values" ? [all] : [likely, all]));
  }
  select.value = String(chosen);
}

// --- the tabs ----------------------------------------------------------------------------------------

const tabs = ["image", "filters", "positions", "distance", "layers", "api"];
let shownTab = null;

function showTab() {
  const key = state.tab === "distance" ? `distance ${turn}` : state.tab;
  for (const name of tabs) {
    $(`tab-${name}`).setAttribute("aria-selected", String(name === state.tab));
    $(`tab-${name}`).tabIndex = name === state.tab ? 0 : -1;
    $(`panel-${name}`).hidden = name !== state.tab;
  }
  if (shownTab === key) return;
  shownTab = key;
  if (state.tab !== "image") quietly(fillPanel(state.tab, key));
}

async function fillPanel(name, key) {
  const panel = $(`panel-${name}`);
  panel.setAttribute("aria-busy", "true");
  if (!panel.firstChild) panel.replaceChildren(el("p", { class: "hint" }, "One moment …"));
  const parts = await Promise.all(models.map((model, i) => {
    if (name === "api") return i ? null : panels.api(model);
    if (name !== "layers" && !model.explainable) return el("section", { class: "card" }, el("h3", {}, model.name), el("p", { class: "hint" }, "This model has no patches and no attention."));
    return name === "distance" ? distancePanel(i) : panels[name](model);
  }));
  if (shownTab !== key) return;
  panel.replaceChildren(el("div", { class: "panel" }, ...parts.filter(Boolean)));
  panel.removeAttribute("aria-busy");
}

async function distancePanel(i) {
  const look = looks[i];
  if (!look) return el("section", { class: "card" }, el("h3", {}, models[i].name), el("p", { class: "hint" }, "Choose an image first."));
  const reach = await explain({ model: look.model.name, method: "distance" }, look.png, look.stop.signal);
  reach.even = evenDistance(look.model.grid, look.model.patch_size);
  return panels.distance(look.model, reach, (layer, head) => {
    set({ tab: "image", method: "attention", layer, head, versus: i ? "model" : state.versus === "class" ? "" : state.versus });
    $("stages").scrollIntoView({ block: "nearest" });
    stages[0]?.canvas.focus({ preventScroll: true });
  });
}

// The mean distance between two patches chosen at random, in pixels.
function evenDistance([h, w], [tall, wide]) {
  let sum = 0;
  for (let dy = -h + 1; dy < h; dy++) for (let dx = -w + 1; dx < w; dx++) {
    sum += Math.hypot(dy * tall, dx * wide) * (h - Math.abs(dy)) * (w - Math.abs(dx));
  }
  return sum / (h * w) ** 2;
}

// --- pointing, keys, play ----------------------------------------------------------------------------

function hover(stage, patch) {
  if (patch === null ? hovered === null : hovered?.stage === stage && hovered.patch === patch) return;
  hovered = patch === null ? null : { stage, patch };
  schedule();
}

function pick(stage, patch) {
  if (stage === null || patch === null || byClass()) {
    hovered = null;
    return set({ patch: "" });
  }
  const [y, x] = place(stage.look, patch);
  const own = `${Math.floor(y * looks[0].h)},${Math.floor(x * looks[0].w)}`;
  return set({ patch: state.patch === own ? "" : own });
}

function key(stage, event) {
  const { look } = stage;
  if (event.key === "Escape") return pick(null);
  if (event.key === "[" || event.key === "]") {
    const layer = layerOf(looks[0]) + (event.key === "]" ? 1 : -1);
    return layer >= 0 && layer < looks[0].model.depth && set({ layer });
  }
  const now = patchOf(look) ?? Math.floor(look.h / 2) * look.w + Math.floor(look.w / 2);
  const next = movedBy(event.key, now, look.n, look.w);
  if (next === null) return undefined;
  event.preventDefault();
  hovered = null;
  const [y, x] = place(look, next);
  return set({ patch: `${Math.floor(y * looks[0].h)},${Math.floor(x * looks[0].w)}` });
}

function stop() {
  clearInterval(timer);
  timer = null;
  $("play").classList.remove("playing");
  $("play-word").textContent = "Play";
}

function play() {
  if (timer !== null) return stop();
  $("play").classList.add("playing");
  $("play-word").textContent = "Pause";
  const step = () => looks.length && set({ layer: (layerOf(looks[0]) + 1) % looks[0].model.depth });
  timer = setInterval(step, 550);
  return step();
}

// --- wiring ------------------------------------------------------------------------------------------

function wire() {
  wireFiles($("file"), open);
  for (const [name, words] of Object.entries(EXAMPLES)) {
    const image = el("img", { src: `/static/example-${name}.webp`, alt: words, width: "320", height: "320" });
    const button = el("button", { type: "button", title: words, "aria-pressed": "false", onclick: () => quietly(openExample(name)) }, image);
    button.dataset.name = name;
    $("examples").append(button);
  }
  $("methods").addEventListener("change", (event) => set({ method: event.target.value }));
  $("class").addEventListener("change", (event) => set({ class: event.target.value }));
  $("other").addEventListener("change", (event) => set({ other: event.target.value }));
  $("versus").addEventListener("change", (event) => {
    const versus = event.target.value;
    set(versus === "class" && !byClass() ? { versus, method: "relevance" } : { versus });
  });
  $("strength").addEventListener("input", (event) => set({ strength: event.target.value }));
  $("grid").addEventListener("change", (event) => set({ grid: event.target.checked ? 1 : 0 }));
  $("smooth").addEventListener("change", (event) => set({ smooth: event.target.checked ? 1 : 0 }));
  $("play").addEventListener("click", play);
  tabs.forEach((name, i) => {
    $(`tab-${name}`).addEventListener("click", () => set({ tab: name }));
    $(`tab-${name}`).addEventListener("keydown", (event) => {
      const next = movedBy(event.key, i, tabs.length);
      if (next === null) return;
      event.preventDefault();
      set({ tab: tabs[next] });
      $(`tab-${tabs[next]}`).focus();
    });
  });
  wireTheme();
  onChange((changes) => {
    if (changes.method && looks.length) looks.forEach((look) => look.model.explainable && quietly(look.ahead(state.method, layerOf(look))));
    render();
  });
}

function introduce() {
  for (const model of models) {
    const size = model.explainable ? `${short(model.params)} parameters, ${model.depth} layers, ${model.runtime}` : `${short(model.params)} parameters, ${model.runtime}`;
    $("chips").append(el("li", { title: model.notes.join("; ") }, el("b", {}, model.name), el("small", {}, size)));
  }
  $("to-data").hidden = !models[0].data;
  document.title = `${models.map((model) => model.name).join(" and ")} · vitkit`;
  if (models.length < 2) $("versus").querySelector('[value="model"]').remove();
  const { one, many } = terms(models[0]);
  $("class-label").textContent = capital(one);
  $("other-label").textContent = `Second ${one}`;
  const two = $("versus").querySelector('[value="class"]');
  if (models[0].outputs.names.length < 2 || !models[0].explainable) two.remove();
  else two.textContent = `Two ${many}`;
  paint($("scale"), Float32Array.from({ length: 256 }, (_, i) => i), 1, 256, 0, 255);
}

async function start() {
  readAddress();
  await loadColours();
  models.push(await get("model"));
  for (const name of models[0].models.slice(1)) models.push(await get("model", { model: name }));
  introduce();
  wire();
  if (state.versus === "model" && models.length < 2) state.versus = "";
  const asked = state.example in EXAMPLES ? state.example : models[0].channels === 1 ? "three" : "cat";
  const kept = { class: state.class, other: state.other, patch: state.patch };
  render();
  await openExample(asked);
  set(kept); // a new image forgets them; the first one is what the address speaks of
  document.documentElement.dataset.ready = "true";
}

quietly(start());
