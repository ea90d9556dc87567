// The map on its canvas: every image a point, and thumbnails where there is room. It draws only when something changed.
//
// Points are written into the pixels directly, which costs a fraction of drawing shapes and needs no graphics card.
// The camera is the place in the middle (0..1 of the map) and a scale (pixels of the screen for the whole map).

import { Levels } from "./map-levels.js";

const SMALLEST = 24; // pixels of a thumbnail in the view of all; they grow with the zoom
const LARGEST = 132; // pixels of a thumbnail, when the map is zoomed in all the way
const FADED = 0x30; // alpha of points that are not highlighted

export class MapView {
  constructor(canvas, store, calls) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.store = store;
    this.calls = calls; // { pick, hover, lasso }
    const { x, y, slot } = store.points;
    Object.assign(this, { x, y, slot, count: x.length });
    const order = new Int32Array(this.count);
    slot.forEach((at, row) => { order[at] = row; });
    this.levels = new Levels(x, y, order);
    this.colours = new Uint32Array(this.count);
    this.lit = null; // Uint8Array: which are highlighted; null: all
    this.marked = []; // rows with a ring: neighbours, found ones, those inside a lasso
    this.selected = -1;
    this.hovered = -1;
    this.images = true;
    this.lassoing = false;
    this.line = null; // the lasso that is being drawn
    this.work = []; // milliseconds of script that each of the last frames took
    this.frames = 0;
    this.camera = { x: 0.5, y: 0.5, scale: 1 };
    this.shown = []; // [row, left, top, size] of the thumbnails of this frame
    store.sheets.arrived = () => this.draw();
    canvas.measure = (frames) => this.measure(frames);
    new ResizeObserver(() => this.#resize()).observe(canvas);
    this.bounds = bounds(x, y);
    this.#resize();
    this.fit();
  }

  #resize() {
    const box = this.canvas.getBoundingClientRect();
    const ratio = Math.min(devicePixelRatio || 1, 2);
    const [w, h] = [Math.max(1, Math.round(box.width * ratio)), Math.max(1, Math.round(box.height * ratio))];
    if (w === this.canvas.width && h === this.canvas.height && this.pixels) return;
    const before = this.w ? this.whole : 0;
    this.canvas.width = w;
    this.canvas.height = h;
    Object.assign(this, { w: w / ratio, h: h / ratio, ratio });
    this.pixels = new ImageData(w, h);
    this.words = new Uint32Array(this.pixels.data.buffer);
    if (before) this.camera.scale *= this.whole / before;
    this.paint(); // at once: setting the size has emptied the canvas
  }

  // --- the camera --------------------------------------------------------------------------------------

  // The scale at which all images are seen.
  get whole() {
    return Math.min(this.w / this.bounds.across, this.h / this.bounds.down) * 0.9;
  }

  fit() {
    this.camera = { x: this.bounds.x, y: this.bounds.y, scale: this.whole };
    this.draw();
  }

  toScreen(row) {
    const { x, y, scale } = this.camera;
    return [(this.x[row] - x) * scale + this.w / 2, (this.y[row] - y) * scale + this.h / 2];
  }

  pan(dx, dy) {
    const { camera } = this;
    camera.x = Math.max(-0.2, Math.min(1.2, camera.x - dx / camera.scale));
    camera.y = Math.max(-0.2, Math.min(1.2, camera.y - dy / camera.scale));
    this.draw();
  }

  // By a factor, around a place on the screen that stays where it is.
  zoom(factor, atX = this.w / 2, atY = this.h / 2) {
    const { camera } = this;
    const scale = Math.max(this.whole / 2, Math.min(this.whole * 4096, camera.scale * factor));
    camera.x += (atX - this.w / 2) * (1 / camera.scale - 1 / scale);
    camera.y += (atY - this.h / 2) * (1 / camera.scale - 1 / scale);
    camera.scale = scale;
    this.draw();
  }

  // So that the image is well inside: the map moves no further than it must.
  reveal(row) {
    const [left, top] = this.toScreen(row);
    const edge = Math.min(56, this.w / 5, this.h / 5);
    const into = (at, size) => Math.max(edge, Math.min(size - edge, at)) - at;
    this.pan(into(left, this.w), into(top, this.h));
  }

  // --- drawing -----------------------------------------------------------------------------------------

  draw() {
    if (this.due) return;
    this.due = requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.due);
    this.due = 0;
    const start = performance.now();
    this.#points();
    this.context.putImageData(this.pixels, 0, 0);
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    this.shown = [];
    const style = getComputedStyle(this.canvas);
    const [accent, ink] = [style.getPropertyValue("--accent"), style.getPropertyValue("--ink")];
    for (const row of this.marked) this.#ring(row, 6, 1.5, ink); // below the thumbnails
    if (this.images) this.#thumbnails();
    this.#rings(accent, ink);
    this.store.sheets.settle();
    this.canvas.dataset.busy = String(this.store.sheets.busy);
    this.work.push(performance.now() - start);
    if (this.work.length > 240) this.work.shift();
    this.frames += 1;
  }

  #points() {
    const { words, x, y, colours, lit, count } = this;
    const { width, height } = this.canvas;
    const scale = this.camera.scale * this.ratio;
    const [left, top] = [width / 2 - this.camera.x * scale, height / 2 - this.camera.y * scale];
    const zoomed = Math.log2(this.camera.scale / this.whole + 1);
    const crowd = Math.max(0.8, Math.min(2.4, 260 / Math.sqrt(count)));
    const stencil = disc(Math.min(6, crowd + 0.7 * zoomed) * this.ratio, width);
    const edge = stencil.edge;
    words.fill(0);
    for (let pass = lit ? 0 : 1; pass < 2; pass++) { // those that are highlighted come last, on top
      for (let i = 0; i < count; i++) {
        if (lit && lit[i] !== pass) continue;
        const px = (x[i] * scale + left) | 0;
        const py = (y[i] * scale + top) | 0;
        if (px < edge || py < edge || px >= width - edge || py >= height - edge) continue;
        const at = py * width + px;
        const colour = pass ? colours[i] : ((colours[i] & 0xffffff) | (FADED << 24)) >>> 0;
        for (const offset of stencil.inner) words[at + offset] = colour;
        const soft = ((colour & 0xffffff) | ((colour >>> 1) & 0x7f000000)) >>> 0;
        for (const offset of stencil.rim) if (words[at + offset] === 0) words[at + offset] = soft;
      }
    }
  }

  #thumbnails() {
    const { camera, context, w, h, lit } = this;
    const zoomed = Math.log2(Math.max(1, camera.scale / this.whole));
    const level = this.levels.at(camera.scale, Math.min(SMALLEST + 8 * zoomed, 56));
    const apart = camera.scale / 2 ** level;
    const size = Math.min(LARGEST, apart * 0.94);
    const half = size / 2;
    context.lineWidth = 2;
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "medium";
    for (const row of this.levels.get(level)) {
      const left = (this.x[row] - camera.x) * camera.scale + w / 2 - half;
      const top = (this.y[row] - camera.y) * camera.scale + h / 2 - half;
      if (left < -size || top < -size || left > w || top > h) continue;
      if (lit && !lit[row]) continue;
      if (row !== this.selected) this.#thumbnail(row, left, top, size);
    }
    if (this.selected < 0) return;
    const [x, y] = this.toScreen(this.selected); // always seen, on top and a little larger
    this.#thumbnail(this.selected, x - half * 1.25, y - half * 1.25, size * 1.25);
  }

  #thumbnail(row, left, top, size) {
    const { context } = this;
    const { tile, sheet_columns: columns } = this.store.about;
    const slot = this.slot[row];
    const sheet = this.store.sheets.take(Math.floor(slot / (columns * columns)));
    if (!sheet) return;
    const at = slot % (columns * columns);
    context.drawImage(sheet, (at % columns) * tile, Math.floor(at / columns) * tile, tile, tile, left, top, size, size);
    context.strokeStyle = `#${hex(this.colours[row])}`;
    context.strokeRect(left + 1, top + 1, size - 2, size - 2);
    this.shown.push([row, left, top, size]);
  }

  #rings(accent, ink) {
    const { context } = this;
    const marked = new Set(this.marked);
    for (const [row] of this.shown) if (marked.has(row)) this.#ring(row, 7, 2, ink);
    if (this.hovered >= 0) this.#ring(this.hovered, 9, 2, ink);
    if (this.selected >= 0) this.#ring(this.selected, 11, 3.5, accent);
    if (!this.line) return;
    context.beginPath();
    this.line.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.closePath();
    context.strokeStyle = accent;
    context.lineWidth = 2;
    context.stroke();
    context.globalAlpha = 0.12;
    context.fillStyle = accent;
    context.fill();
    context.globalAlpha = 1;
  }

  #ring(row, radius, width, colour) {
    const { context } = this;
    const thumb = this.shown.find(([shown]) => shown === row);
    const [x, y] = this.toScreen(row);
    context.beginPath();
    if (thumb) context.rect(thumb[1] - 1, thumb[2] - 1, thumb[3] + 2, thumb[3] + 2);
    else context.arc(x, y, radius, 0, 7);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
  }

  // --- what is where -----------------------------------------------------------------------------------

  // The image at a place on the screen: the thumbnail there, else the nearest point within reach; -1: none.
  at(px, py, reach = 14) {
    for (let i = this.shown.length - 1; i >= 0; i--) {
      const [row, left, top, size] = this.shown[i];
      if (px >= left && py >= top && px < left + size && py < top + size) return row;
    }
    const { camera } = this;
    const [wx, wy] = [(px - this.w / 2) / camera.scale + camera.x, (py - this.h / 2) / camera.scale + camera.y];
    let [best, least] = [-1, (reach / camera.scale) ** 2];
    for (let i = 0; i < this.count; i++) {
      const away = (this.x[i] - wx) ** 2 + (this.y[i] - wy) ** 2;
      if (away < least && (!this.lit || this.lit[i])) [best, least] = [i, away];
    }
    return best;
  }

  // The nearest image in a direction from another: within 45 degrees of it.
  towards(row, dx, dy) {
    let [best, least] = [-1, Infinity];
    for (let i = 0; i < this.count; i++) {
      if (this.lit && !this.lit[i]) continue;
      const [ax, ay] = [this.x[i] - this.x[row], this.y[i] - this.y[row]];
      const along = ax * dx + ay * dy;
      const across = Math.abs(ax * dy) + Math.abs(ay * dx);
      if (along <= 0 || across > along || i === row) continue;
      const away = along + 2 * across;
      if (away < least) [best, least] = [i, away];
    }
    return best;
  }

  inside(line) {
    const { camera } = this;
    const places = line.map(([px, py]) => [(px - this.w / 2) / camera.scale + camera.x, (py - this.h / 2) / camera.scale + camera.y]);
    const rows = [];
    for (let i = 0; i < this.count; i++) {
      if (this.lit && !this.lit[i]) continue;
      const [x, y] = [this.x[i], this.y[i]];
      let odd = false;
      for (let a = 0, b = places.length - 1; a < places.length; b = a++) {
        const [[ax, ay], [bx, by]] = [places[a], places[b]];
        if (ay > y !== by > y && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) odd = !odd;
      }
      if (odd) rows.push(i);
    }
    return rows;
  }

  // Pans to and fro for so many frames, and says what they took: milliseconds of script each, frames in a second.
  async measure(frames = 120) {
    const kept = { ...this.camera };
    const work = [];
    const start = performance.now();
    for (let i = 0; i < frames; i++) {
      await new Promise((done) => requestAnimationFrame(done));
      const angle = (2 * Math.PI * i) / frames;
      this.camera.x = kept.x + (0.2 * this.whole * Math.sin(angle)) / kept.scale;
      this.camera.y = kept.y + (0.1 * this.whole * Math.sin(2 * angle)) / kept.scale;
      this.paint();
      work.push(this.work.at(-1));
    }
    const seconds = (performance.now() - start) / 1000;
    this.camera = kept;
    this.paint();
    work.sort((a, b) => a - b);
    return { points: this.count, thumbnails: this.shown.length, best: work[0], median: work[frames >> 1], p95: work[Math.floor(frames * 0.95)], fps: frames / seconds };
  }
}

function bounds(x, y) {
  const span = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [1, 0]);
  const [[left, right], [top, bottom]] = [span(x), span(y)];
  return { x: (left + right) / 2, y: (top + bottom) / 2, across: Math.max(right - left, 1e-3), down: Math.max(bottom - top, 1e-3) };
}

const hex = (colour) => [colour & 255, (colour >> 8) & 255, (colour >> 16) & 255].map((n) => n.toString(16).padStart(2, "0")).join("");

let last = {};
// The places of a disc's pixels, as steps from its middle in rows of `width`: those inside, and the soft rim.
function disc(radius, width) {
  if (last.radius === radius && last.width === width) return last;
  const edge = Math.ceil(radius);
  const [inner, rim] = [[], []];
  for (let dy = -edge; dy <= edge; dy++) for (let dx = -edge; dx <= edge; dx++) {
    const away = Math.hypot(dx, dy);
    if (away <= radius - 0.3) inner.push(dy * width + dx);
    else if (away <= radius + 0.4) rim.push(dy * width + dx);
  }
  last = { radius, width, edge, inner: Int32Array.from(inner), rim: Int32Array.from(rim) };
  return last;
}
