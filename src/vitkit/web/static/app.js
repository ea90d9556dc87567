// The page: which image, what is shown of it, and the parts that show it.

import { explain, file, fromDataUrl, get, post } from "./api.js";
import { loadColours, paint } from "./colours.js";
import { $, bar, capital, el, movedBy, number, patchName, percent, short } from "./dom.js";
import { Look } from "./look.js";
import { checkSize, complain, quietly, wireFiles, wireTheme } from "./page.js";
import * as panels from "./panels.js";
import { photoOf } from "./photo.js";
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
let looks = []; // of the image on screen, one for each model
let stages = [];
let hovered = null; // { stage, patch } under the pointer
let turn = 0; // counts images that were asked for, so that a late answer of an earlier one is not shown
let shownTurn = 0; // that of the image on screen
let timer = null;

// --- an image comes in ------------------------------------------------------------------------------

async function open(blob, example = "") {
  $("errors").replaceChildren();
  checkSize(blob, models[0].limits.max_bytes);
  const mine = ++turn;
  const name = example ? EXAMPLES[example] : blob.name ?? "pasted image";
  render(); // what is on screen waits
  try {
    const opened = await Promise.all(models.map((model) => lookAt(model, blob, name)));
    if (mine !== turn) return opened.forEach((look) => look.close());
    looks.forEach((look) => look.close());
    looks = opened;
    hovered = null;
    shownTurn = mine;
    set({ example, class: "", other: "", patch: "" });
    render();
    fetchAhead();
  } finally {
    if (mine === turn) shownTurn = turn; // also when it failed: the last good image stays, and waits for nothing
    render();
  }
}

async function lookAt(model, blob, name) {
  const [answer, photo] = await Promise.all([post("predict", { model: model.name, top: "5", image: "true" }, blob), photoOf(blob, model)]);
  const { predictions } = await answer.json();
  const png = fromDataUrl(predictions[0].picture);
  const { classes, values } = predictions[0];
  const ranked = values ? values.map((value, i) => ({ class: i, ...value })) : classes;
  return new Look(model, png, await createImageBitmap(png), photo, name, ranked, { arrived: schedule, failed: complain });
}

const fetchAhead = () => shownLooks().forEach((look) => look.model.explainable && quietly(look.ahead(method(), layerOf(look))));

async function openExample(name) {
  await open(await file(`example-${name}.webp`), name);
}

// --- what is asked for -------------------------------------------------------------------------------

// The model that is shown, and the one beside it, as places in `models` and `looks`.
const named = (name) => models.findIndex((model) => model.name === name);
const first = () => Math.max(0, named(state.model));
const second = () => {
  const chosen = named(state.second);
  return chosen >= 0 && chosen !== first() ? chosen : models.findIndex((_, i) => i !== first());
};
const main = () => looks[first()];
const versus = () => {
  const { outputs, explainable } = models[first()];
  if (state.versus === "model") return models.length > 1 ? "model" : "";
  return state.versus === "class" && explainable && outputs.names.length > 1 ? "class" : "";
};
const shownLooks = () => (versus() === "model" ? [main(), looks[second()]] : [main()]).filter(Boolean);

const terms = (model) => OUTPUTS[model.outputs.kind];
const ofClass = (name) => name === "relevance" || name === "gradcam";
const method = () => (ofClass(state.method) && !models[first()].outputs.names.length ? "attention" : state.method);
const byClass = () => ofClass(method());
const layerOf = (look) => Math.min(state.layer === "" ? look.model.depth - 1 : Number(state.layer), look.model.depth - 1);
const headOf = (look) => (method() === "rollout" || Number(state.head) >= look.model.heads ? "mean" : state.head);

function classOf(look) {
  if (look !== main()) { // the class of the same name, or what this model thinks itself
    const name = main().model.outputs.names[classOf(main())];
    const same = look.model.outputs.names.indexOf(name);
    return same >= 0 && look.model.outputs.names.length === main().model.outputs.names.length ? same : look.ranked[0]?.class;
  }
  return state.class !== "" && Number(state.class) < look.model.outputs.names.length ? Number(state.class) : look.ranked[0]?.class;
}

function otherClass(look) {
  const first = classOf(look);
  if (state.other !== "" && Number(state.other) < look.model.outputs.names.length) return Number(state.other);
  return (look.ranked.find((rank) => rank.class !== first) ?? look.ranked[0])?.class;
}

// The patch that is asked, in the grid of `look`: the one pointed at, else the one chosen; null is the output.
const pointing = () => hovered !== null && hovered.patch !== null;
const patchOf = (look) => (pointing() ? inGrid(look, place(hovered.stage.look, hovered.patch)) : pinnedOf(look));

function pinnedOf(look) {
  if (!state.patch) return null;
  const [row, column] = state.patch.split(",").map(Number);
  return inGrid(look, place(main(), Math.min(row, main().h - 1) * main().w + Math.min(column, main().w - 1)));
}

const inGrid = (look, [y, x]) =>
  Math.min(look.h - 1, Math.floor(y * look.h)) * look.w + Math.min(look.w - 1, Math.floor(x * look.w));
const place = (look, patch) => [(Math.floor(patch / look.w) + 0.5) / look.h, ((patch % look.w) + 0.5) / look.w];

function views() {
  if (!looks.length) return [];
  if (versus() === "class" && byClass()) return [classOf(main()), otherClass(main())].map((cls) => ({ look: main(), cls }));
  return shownLooks().map((look) => ({ look, cls: classOf(look) }));
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
  $("strips").hidden = !models[first()].explainable;
  if (shown.length && shown[0].look.model.explainable) showStrips(shown[0]);
}

function question(view) {
  const patch = byClass() ? null : patchOf(view.look);
  return { method: method(), layer: layerOf(view.look), head: headOf(view.look), patch, cls: view.cls, pinned: !pointing() };
}

// Everything about a stage belongs to one question: a map that has not come yet leaves the words empty too.
function showStage(stage, view, two) {
  const { look } = view;
  const asked = look.model.explainable && !(byClass() && !look.ranked.length) ? question(view) : null;
  const values = asked && look.map(asked);
  const pointed = look.model.explainable ? patchOf(look) : null;
  stage.show(look, state.seen === "1");
  nameStage(stage, view, two);
  stage.frame.classList.toggle("waiting", shownTurn !== turn || Boolean(asked && !values));
  stage.free.hidden = !state.patch || byClass();
  stage.draw({
    values, strength: Number(state.strength) / 100, smooth: state.smooth === "1", grid: state.grid === "1",
    patch: pointed, pinned: Boolean(state.patch) && !pointing(),
  });
  if (values) stage.words.replaceChildren(...describe(look, asked, values, pointed));
  else stage.words.textContent = look.model.explainable ? (asked ? "One moment …" : "This model has no classifier.") : "This model has no attention to look at.";
}

function nameStage(stage, { look, cls }, two) {
  const className = byClass() && cls !== undefined ? look.model.outputs.names[cls] : "";
  const seen = `${look.seen.width} × ${look.seen.height}`;
  const size = look.photo ? `${look.photo.size.join(" × ")} pixels, seen at ${seen}` : `seen at ${seen} pixels`;
  const parts = [className, versus() === "model" ? look.model.name : "", look.name, size].filter(Boolean);
  stage.title.textContent = parts.shift();
  stage.note.textContent = (two ? parts.slice(0, 1) : parts).join(" · ");
  stage.figure.querySelector("figcaption").title = [className, look.model.name, look.name, size].filter(Boolean).join(" · ");
}

const strongest = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);
const asking = (look, patch) => (patch === null ? (look.model.pooling === "cls" ? "the class token" : "the output") : patchName(patch, look.w));

function describe(look, { layer, head, patch, method: how }, values, pointed) {
  if (byClass()) {
    const total = values.reduce((a, b) => a + b, 0);
    if (!total) return [`Nothing in the image ${terms(look.model).speaks} this ${terms(look.model).one}: the map is zero everywhere.`];
    const at = pointed ?? strongest(values);
    const name = patchName(at, look.w);
    return [pointed === null ? "Most at " : "", el("b", {}, pointed === null ? name : capital(name)), `: ${percent(values[at] / total)} of the whole map`];
  }
  const where = how === "rollout" ? `up to layer ${layer}` : `in layer ${layer}, ${head === "mean" ? "mean of the heads" : `head ${head}`}`;
  const most = strongest(values);
  return [el("b", {}, capital(asking(look, patch))), ` attends most to ${most === patch ? "itself" : patchName(most, look.w)} (${percent(values[most])}) ${where}`];
}

const layerStrip = new Strip($("layer-strip"), (i) => {
  stop();
  set(byClass() ? { class: main().ranked[i].class } : { layer: i });
});
const headStrip = new Strip($("head-strip"), (i) => set({ head: i ? i - 1 : "mean" }));

function showStrips(view) {
  const { look } = view;
  $("play").hidden = byClass();
  $("heads-part").hidden = method() !== "attention";
  $("layer-strip").classList.toggle("words", byClass());
  for (const id of ["layer-strip", "head-strip"]) $(id).classList.toggle("smooth", state.smooth === "1");
  const whose = versus() === "model" ? `${look.model.name}, ` : ""; // the strips are those of the first model
  $("strip-from").textContent = whose.slice(0, -2);
  if (byClass()) return showClassStrip(view);
  const layers = Array.from({ length: look.model.depth }, (_, i) => i);
  const heads = method() === "attention" ? ["mean", ...Array.from({ length: look.model.heads }, (_, i) => String(i))] : [];
  const { asked, ofLayers, ofHeads } = stripMaps(view, layers, heads);
  $("strip-from").textContent = `${whose}seen from ${asking(look, asked.patch)}`;
  $("layers-title").textContent = method() === "rollout" ? "Rolled out up to layer" : "Layer";
  layerStrip.show(layers.map(String), layers.map((i) => `Layer ${i}`), ofLayers, look.h, look.w, asked.layer);
  layerStrip.reveal();
  const names = heads.map((head) => (head === "mean" ? "Mean of the heads" : `Head ${head}`));
  return headStrip.show(heads, names, ofHeads, look.h, look.w, heads.indexOf(asked.head));
}

// All small maps are of one patch: the one pointed at when they all are here, else the one chosen, or the output.
function stripMaps(view, layers, heads) {
  const maps = (asked, fetch) => ({
    asked,
    ofLayers: layers.map((layer) => view.look.map({ ...asked, layer }, fetch)),
    ofHeads: heads.map((head) => view.look.map({ ...asked, head }, fetch)),
  });
  const asked = question(view);
  if (pointing()) {
    const found = maps(asked, false);
    if ([...found.ofLayers, ...found.ofHeads].every(Boolean)) return found;
  }
  return maps({ ...asked, patch: pinnedOf(view.look), pinned: true }, true);
}

function showClassStrip(view) {
  const { look } = view;
  stop();
  $("layers-title").textContent = capital(terms(look.model).one);
  const names = look.ranked.map((rank) => rank.name);
  const maps = look.ranked.map((rank) => look.map({ ...question(view), cls: rank.class }, false));
  layerStrip.show(names, names, maps, look.h, look.w, look.ranked.findIndex((rank) => rank.class === view.cls));
  headStrip.show([], [], [], look.h, look.w, -1); // hidden, and waiting for nothing
}

function showRanks() {
  const key = JSON.stringify([looks.map((look) => look.ranked), versus(), byClass(), state.class, state.other, first(), second(), shownTurn]);
  if (key === showRanks.key) return;
  showRanks.key = key;
  const shown = shownLooks();
  const focused = [...$("ranks").querySelectorAll("button")].indexOf(document.activeElement);
  $("ranks").replaceChildren(...shown.flatMap(ranksOf), ...hintsOf(shown));
  if (focused >= 0) $("ranks").querySelectorAll("button")[focused]?.focus();
}

function ranksOf(look) {
  const title = models.length > 1 ? [el("p", { class: "rank-model" }, look.model.name)] : [];
  if (!look.ranked.length) return [...title, el("p", { class: "hint" }, "This model has no classifier.")];
  const chosen = byClass() ? classOf(look) : null;
  const other = byClass() && versus() === "class" && look === main() ? otherClass(look) : null;
  const fresh = look.model.trained ? [] : [el("p", { class: "untrained" }, "These weights are not trained: what they answer is chance.")];
  return [...title, ...fresh, ...look.ranked.map((rank) => {
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
  const how = byClass() ? method() : "relevance";
  const name = look.model.outputs.names[cls];
  const own = look === main() ? cls : main().model.outputs.names.indexOf(name);
  if (own >= 0) set({ method: how, class: own });
  else set({ method: how });
}

function showControls() {
  const model = models[first()];
  const { one, many, speaks } = terms(model);
  for (const input of document.querySelectorAll("#methods input")) {
    input.checked = input.value === method();
    input.disabled = !model.explainable || (!model.outputs.names.length && ofClass(input.value));
  }
  const shows = byClass() ? `What ${speaks} a ${one}: ` : "";
  $("method-words").textContent = model.explainable ? shows + WORDS[method()] : "A model without attention has predictions only.";
  $("class-label").textContent = capital(one);
  $("other-label").textContent = `Second ${one}`;
  $("class-field").hidden = !byClass();
  $("other-field").hidden = !(byClass() && versus() === "class");
  const two = $("versus").querySelector('[value="class"]');
  two.textContent = `Two ${many}`;
  two.hidden = two.disabled = model.outputs.names.length < 2 || !model.explainable;
  $("versus").value = versus();
  $("versus-field").hidden = models.length < 2 && two.hidden;
  $("strength").value = state.strength;
  $("strength-value").textContent = `${state.strength}%`;
  $("grid").checked = state.grid === "1";
  $("smooth").checked = state.smooth === "1";
  $("seen").checked = state.seen === "1";
  showChips();
  if (!looks.length) return;
  fillClasses($("class"), main(), classOf(main()));
  fillClasses($("other"), main(), otherClass(main()));
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
  const key = state.tab === "distance" ? `distance ${shownTurn}` : state.tab;
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
    if (name === "api") return i ? null : panels.api(model); // the first answers where no model is named
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
    const shown = shownLooks().includes(look) ? {} : { model: look.model.name };
    set({ tab: "image", method: "attention", layer, head, versus: versus() === "class" ? "" : versus(), ...shown });
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
  const own = ownPatch(stage.look, patch);
  return set({ patch: state.patch === own ? "" : own });
}

// As the address has it: ROW,COLUMN in the grid of the model that is shown.
function ownPatch(look, patch) {
  const [y, x] = place(look, patch);
  return `${Math.floor(y * main().h)},${Math.floor(x * main().w)}`;
}

function key(stage, event) {
  const { look } = stage;
  if (event.key === "Escape") return pick(null);
  if (event.key === "[" || event.key === "]") {
    const layer = layerOf(main()) + (event.key === "]" ? 1 : -1);
    return layer >= 0 && layer < main().model.depth && set({ layer });
  }
  const now = patchOf(look) ?? Math.floor(look.h / 2) * look.w + Math.floor(look.w / 2);
  const next = movedBy(event.key, now, look.n, look.w);
  if (next === null) return undefined;
  event.preventDefault();
  hovered = null;
  return set({ patch: ownPatch(look, next) });
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
  const step = () => looks.length && set({ layer: (layerOf(main()) + 1) % main().model.depth });
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
    const chosen = event.target.value;
    set({ versus: chosen, ...(chosen === "class" && !byClass() ? { method: "relevance" } : {}) });
  });
  $("strength").addEventListener("input", (event) => set({ strength: event.target.value }));
  $("grid").addEventListener("change", (event) => set({ grid: event.target.checked ? 1 : 0 }));
  $("smooth").addEventListener("change", (event) => set({ smooth: event.target.checked ? 1 : 0 }));
  $("seen").addEventListener("change", (event) => set({ seen: event.target.checked ? 1 : 0 }));
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
    if (["model", "second", "versus"].some((name) => name in changes)) hovered = null;
    if (looks.length && ["method", "model", "second", "versus"].some((name) => name in changes)) fetchAhead();
    render();
  });
}

// --- the models --------------------------------------------------------------------------------------

// One model is named. Of several, a click shows another one, and `Compare` shows two side by side.
function introduce() {
  const several = models.length > 1;
  for (const model of models) {
    const size = model.explainable ? `${short(model.params)} parameters, ${model.depth} layers, ${model.runtime}` : `${short(model.params)} parameters, ${model.runtime}`;
    const parts = [el("b", {}, model.name), el("small", {}, size)];
    const title = model.notes.join("; ") || null;
    $("chips").append(several ? el("li", {}, el("button", { type: "button", title, onclick: () => chooseModel(model.name) }, ...parts)) : el("li", { title }, ...parts));
  }
  const compare = () => set({ versus: versus() === "model" ? "" : "model" });
  if (several) $("chips").append(el("li", {}, el("button", { id: "compare", type: "button", onclick: compare }, "Compare")));
  else $("versus").querySelector('[value="model"]').remove();
  $("to-data").hidden = !models[0].data;
  document.title = `${models.map((model) => model.name).join(" and ")} · vitkit`;
  paint($("scale"), Float32Array.from({ length: 256 }, (_, i) => i), 1, 256, 0, 255);
}

function chooseModel(name) {
  const now = models[first()].name;
  if (name === now) return undefined;
  const kept = { class: "", other: "", patch: "" }; // they are numbers of the other model
  if (versus() !== "model") return set({ model: name, second: now, ...kept });
  return name === models[second()].name ? set({ model: name, second: now, ...kept }) : set({ second: name });
}

function showChips() {
  const shown = versus() === "model" ? [first(), second()] : [first()];
  [...$("chips").querySelectorAll("button:not(#compare)")].forEach((chip, i) => {
    chip.setAttribute("aria-pressed", String(shown.includes(i)));
    chip.classList.toggle("second", versus() === "model" && i === second());
  });
  $("compare")?.setAttribute("aria-pressed", String(versus() === "model"));
}

async function start() {
  readAddress();
  await loadColours();
  models.push(await get("model"));
  for (const name of models[0].models.slice(1)) models.push(await get("model", { model: name }));
  introduce();
  wire();
  const asked = state.example in EXAMPLES ? state.example : models[first()].channels === 1 ? "three" : "cat";
  const kept = { class: state.class, other: state.other, patch: state.patch };
  render();
  await openExample(asked);
  set(kept); // a new image forgets them; the first one is what the address speaks of
  document.documentElement.dataset.ready = "true";
}

quietly(start());
