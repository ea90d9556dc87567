// The tabs about the model itself: filters, positions, attention distance, layers, and how to call the API.

import { get } from "./api.js";
import { paint } from "./colours.js";
import { bar, capital, el, movedBy, patchName, percent, short, svg } from "./dom.js";

const loaded = new Map(); // what does not change while the page is open

function part(model, name) {
  const key = `${name} ${model.name}`;
  if (!loaded.has(key)) {
    const promise = get(`model/${name}`, { model: model.name });
    promise.catch(() => loaded.delete(key));
    loaded.set(key, promise);
  }
  return loaded.get(key);
}

const card = (model, ...children) => el("section", { class: "card" }, el("h3", {}, model.name), ...children);
const hint = (...words) => el("p", { class: "hint" }, ...words);

// --- filters -----------------------------------------------------------------------------------------

export async function filters(model) {
  const found = await part(model, "filters");
  const [count, tall, wide, channels] = found.shape;
  const tiles = found.tiles.map((tile, i) => {
    const canvas = el("canvas", { width: wide, height: tall, role: "img", "aria-label": `Component ${i + 1}, ${percent(found.explained[i])} of the variance` });
    const image = new ImageData(wide, tall);
    tile.flat().forEach((pixel, k) => {
      const colour = channels === 3 ? pixel : [pixel[0], pixel[0], pixel[0]];
      image.data.set([...colour, 255], 4 * k);
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return el("li", {}, canvas, bar(found.explained[i] / found.explained[0]), el("small", {}, percent(found.explained[i])));
  });
  const total = found.explained.reduce((a, b) => a + b, 0);
  const where = found.of_pixels ? "" : " They see the feature map of the stem, not pixels; channels are averaged.";
  const expect = model.trained ? "Long training makes them smooth waves and colour contrasts; after a short one they are still grainy."
    : "These weights are fresh: what is seen is noise, where trained models show smooth waves.";
  return card(model,
    hint(`The first ${count} principal components of the patch embedding hold ${percent(total)} of its variance. ${expect}${where}`),
    el("ul", { class: "tiles" }, ...tiles));
}

// --- positions ---------------------------------------------------------------------------------------

export async function positions(model) {
  if (model.positions === "none") return card(model, hint("This model has no positions."));
  const found = await part(model, "positions");
  return found.shows === "similarity" ? similarity(model, found.values) : offsets(model, found.values);
}

function similarity(model, values) {
  const [h, w] = [values.length, values[0].length];
  const low = Math.min(0, ...values.flat(3));
  const mosaic = el("canvas", { class: "map", tabindex: "0", role: "application", "aria-label": `Position similarity, ${h} by ${w} small maps. Arrow keys choose a patch.` });
  const large = el("canvas", { role: "img" });
  const words = el("figcaption", { role: "status" });
  drawMosaic(mosaic, values, low);
  let chosen = Math.floor(h / 2) * w + Math.floor(w / 2);
  const choose = (index) => {
    chosen = index;
    const [row, column] = [Math.floor(index / w), index % w];
    const map = values[row][column].flat();
    paint(large, map, h, w, low, 1, "viridis");
    const others = map.filter((_, i) => i !== index);
    const most = map.indexOf(Math.max(...others));
    words.textContent = `${capital(patchName(index, w))} is most like ${patchName(most, w)} (cosine ${map[most].toFixed(2)})`;
    large.setAttribute("aria-label", words.textContent);
  };
  mosaic.addEventListener("pointermove", (event) => {
    const box = mosaic.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * h);
    const column = Math.floor(((event.clientX - box.left) / box.width) * w);
    if (row >= 0 && row < h && column >= 0 && column < w) choose(row * w + column);
  });
  mosaic.addEventListener("keydown", (event) => {
    const index = movedBy(event.key, chosen, h * w, w);
    if (index === null) return;
    event.preventDefault();
    choose(index);
  });
  choose(chosen);
  return card(model,
    hint(`Positions are '${model.positions}'. Each small map shows how alike one patch's position is to all others. ` +
      "Point at one to see it large. Rows and columns that light up say that the model knows the plane."),
    el("div", { class: "pair" }, el("figure", {}, mosaic), el("figure", {}, large, words)));
}

// All the small maps in their places, with a thin gap between them.
function drawMosaic(mosaic, values, low) {
  const [h, w] = [values.length, values[0].length];
  const block = Math.max(1, Math.round(1100 / (Math.max(h, w) * Math.max(h, w)))); // pixels of one value
  const gap = Math.max(1, Math.round((block * Math.max(h, w)) / 16));
  mosaic.width = w * (w * block + gap) - gap;
  mosaic.height = h * (h * block + gap) - gap;
  const context = mosaic.getContext("2d");
  context.imageSmoothingEnabled = false;
  const tile = document.createElement("canvas");
  values.forEach((row, i) => row.forEach((map, j) => {
    paint(tile, map.flat(), h, w, low, 1, "viridis");
    context.drawImage(tile, j * (w * block + gap), i * (h * block + gap), w * block, h * block);
  }));
}

function offsets(model, values) {
  const flat = values.flat(3);
  const high = Math.max(...flat.map(Math.abs));
  const tiles = values.flatMap((heads, layer) => heads.map((map, head) => {
    const name = `Layer ${layer}, head ${head}`;
    const canvas = el("canvas", { role: "img", "aria-label": name });
    paint(canvas, map.flat(), map.length, map[0].length, -high, high, "viridis");
    return el("li", {}, canvas, el("small", {}, name));
  }));
  return card(model, hint("What each head adds to its scores for a patch so many rows and columns away; the centre is the patch itself."),
    el("ul", { class: "tiles" }, ...tiles));
}

// --- attention distance ------------------------------------------------------------------------------

// 1, 2 or 5 times a power of ten, not below `least`.
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
}

export function distance(model, { shape, values, even }, show) {
  const [layers, heads] = shape;
  const [width, height, left, right, bottom, top] = [820, 330, 46, 92, 40, 14];
  const step = niceStep(Math.max(even, ...values) / 4);
  const most = step * Math.ceil(Math.max(even, ...values) / step);
  const x = (layer) => left + ((layer + 0.5) / layers) * (width - left - right);
  const y = (pixels) => height - bottom - (pixels / most) * (height - bottom - top);
  const chart = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Mean attention distance by layer and head" });
  for (let value = 0; value <= most + step / 2; value += step) {
    chart.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, String(Number(value.toPrecision(3)))));
  }
  const every = Math.ceil(layers / 16);
  for (let layer = 0; layer < layers; layer += every) {
    chart.append(svg("text", { x: x(layer), y: height - bottom + 18, "text-anchor": "middle" }, String(layer)));
  }
  chart.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "layer"),
    svg("line", { class: "even", x1: left, x2: width - right, y1: y(even), y2: y(even) }),
    svg("text", { class: "even-word", x: width - right + 8, y: y(even) + 4 }, "spread evenly"));
  const means = Array.from({ length: layers }, (_, l) => values.slice(l * heads, (l + 1) * heads).reduce((a, b) => a + b, 0) / heads);
  chart.append(svg("polyline", { class: "mean", points: means.map((m, l) => `${x(l)},${y(m)}`).join(" ") }));
  const dots = [...values].map((value, i) => {
    const [layer, head] = [Math.floor(i / heads), i % heads];
    const name = `Layer ${layer}, head ${head}: ${value.toFixed(1)} pixels. Show it on the image`;
    const spread = ((head + 0.5) / heads - 0.5) * Math.min(34, ((width - left - right) / layers) * 0.62);
    const dot = svg("circle", { class: "dot", cx: x(layer) + spread, cy: y(value), r: 6, role: "button", tabindex: i ? -1 : 0, "aria-label": name }, svg("title", {}, name));
    dot.addEventListener("click", () => show(layer, head));
    dot.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") show(layer, head);
      const next = movedBy(event.key, i, values.length, heads);
      if (next === null && event.key !== " ") return;
      event.preventDefault();
      if (next !== null) dots[next].focus();
    });
    chart.append(dot);
    return dot;
  });
  const [near, far] = [means[0], means[layers - 1]].map((m) => m.toFixed(most < 20 ? 1 : 0));
  return card(model,
    hint(`Attention distance of each head on this image, in pixels between patch centres. Layer 0 attends ${near} pixels away on average, ` +
      `the last ${far}. Click a head to see it on the image.`), el("div", { class: "chart-room" }, chart));
}

// --- layers ------------------------------------------------------------------------------------------

export async function layers(model) {
  const table = await part(model, "layers");
  const most = Math.max(...table.layers.map((row) => row.macs), 1);
  const facts = [["parameters", short(table.params)], ["multiply-adds", `${table.gmacs.toPrecision(3)} G`],
    ["image", table.image_size.join(" × ")], ["patch", table.patch_size.join(" × ")], ["tokens", table.tokens],
    ["layers", table.depth], ["width", table.width], ["heads", table.heads], [model.outputs.kind, table.classes]];
  const rows = table.layers.map((row) => el("tr", {}, el("th", { scope: "row" }, row.name), el("td", {}, row.kind),
    el("td", {}, row.shape.join(" × ")), el("td", {}, row.params.toLocaleString("en")), el("td", {}, short(row.macs)),
    el("td", { class: "share" }, bar(row.macs / most))));
  const head = ["name", "kind", "output", "parameters", "multiply-adds", "share"].map((word) => el("th", { scope: "col" }, word));
  return card(model,
    el("div", { class: "facts" }, ...facts.map(([name, value]) => el("div", {}, el("b", {}, String(value)), name))),
    el("div", { class: "rows", tabindex: "0", role: "region", "aria-label": `Layers of ${model.name}` },
      el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))));
}

// --- the API -----------------------------------------------------------------------------------------

export function api(model) {
  const here = location.origin;
  const values = model.outputs.kind === "values";
  const answers = [
    [values ? "The values" : `The likeliest ${model.outputs.kind}`, `curl --data-binary @photo.jpg '${here}/api/v1/predict${values ? "" : "?top=5"}'`],
    ["Several images at once", `curl -F a=@one.jpg -F b=@two.jpg ${here}/api/v1/predict`],
    ["From Python", `import httpx\nanswer = httpx.post("${here}/api/v1/predict", content=open("photo.jpg", "rb").read())\nprint(answer.json())`],
  ];
  const why = [values ? "What raises the first value, as an image" : "What speaks for the likeliest class, as an image",
    `curl --data-binary @photo.jpg '${here}/api/v1/explain?method=relevance&format=png' -o why.png`];
  const attention = ["What one patch (ROW,COLUMN, counted from 0) attends to, as numbers",
    `curl --data-binary @photo.jpg '${here}/api/v1/explain?method=attention&layer=-1&query=0,0'`];
  const predicts = model.outputs.names.length > 0; // what a model cannot answer is not offered
  const calls = [...(predicts ? answers : []), ...(predicts && model.explainable ? [why] : []), ...(model.explainable ? [attention] : [])];
  const parts = calls.map(([what, code]) => {
    const copy = el("button", { class: "quiet", type: "button", "aria-label": `Copy: ${what}` }, "Copy");
    copy.addEventListener("click", async () => {
      await navigator.clipboard?.writeText(code);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    });
    return el("div", { class: "call" }, el("p", {}, what), el("pre", { tabindex: "0" }, el("code", {}, code)), copy);
  });
  const limit = (model.limits.max_bytes / 2 ** 20).toFixed(0);
  return el("section", { class: "card" }, el("h3", {}, "Call it from anywhere"),
    hint(`Images up to ${limit} MB; requests that arrive together are computed together. Everything is described in `,
      el("a", { href: "/openapi.json" }, "/openapi.json"), "; Prometheus reads ", el("a", { href: "/metrics" }, "/metrics"), "."), ...parts);
}
