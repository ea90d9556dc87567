// The map on its canvas: every image a point, and thumbnails where there is room. It draws only when something changed.
// The bitmap of points and thumbnails is a `Scene`; rings, the selected image and the lasso lie on top of it.
//
// The camera is the place in the middle (0..1 of the map) and a scale (pixels of the screen for the whole map).

import { Scene } from "./map-scene.js";

export class MapView {
  constructor(canvas, store, calls) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.store = store;
    this.calls = calls; // { pick, hover, lasso }
    const { x, y } = store.points;
    Object.assign(this, { x, y, count: x.length });
    this.scene = new Scene(store);
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
    this.arrivals = 0; // sheets of thumbnails that have come
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
    if (w === this.canvas.width && h === this.canvas.height && this.w) return;
    const before = this.w ? this.whole : 0;
    this.canvas.width = w;
    this.canvas.height = h;
    Object.assign(this, { w: w / ratio, h: h / ratio, ratio });
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

  // A sheet of thumbnails has come: what was drawn lacks them.
  arrived() {
    this.arrivals += 1;
    this.draw();
  }

  draw() {
    if (this.due) return;
    this.due = requestAnimationFrame(() => this.paint());
  }

  paint() {
    cancelAnimationFrame(this.due);
    this.due = 0;
    const start = performance.now();
    this.corner = this.scene.place(this);
    this.context.setTransform(1, 0, 0, 1, 0, 0);
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.context.drawImage(this.scene.canvas, ...this.corner);
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    const style = getComputedStyle(this.canvas);
    this.#selected();
    this.#rings(style.getPropertyValue("--accent"), style.getPropertyValue("--ink"));
    this.store.sheets.settle();
    this.canvas.dataset.busy = String(this.store.sheets.busy);
    this.work.push(performance.now() - start);
    if (this.work.length > 240) this.work.shift();
    this.frames += 1;
  }

  // The thumbnail of the selected image is always seen, a little larger.
  #selected() {
    this.large = null;
    if (this.selected < 0 || !this.images) return;
    const size = this.scene.size * 1.25;
    const [x, y] = this.toScreen(this.selected);
    const [left, top] = [x - size / 2, y - size / 2];
    this.context.lineWidth = 2;
    if (this.scene.thumbnail(this.context, this.selected, left, top, size, this.colours)) this.large = [left, top, size];
  }

  // Where the thumbnail of an image lies on the screen now; undefined: it has none.
  thumbnail(row) {
    if (row === this.selected && this.large) return this.large;
    const held = this.scene.shown.get(row);
    if (!held) return undefined;
    const [dx, dy] = this.scene.moved(this);
    return [held[0] + dx / this.ratio, held[1] + dy / this.ratio, held[2]];
  }

  #rings(accent, ink) {
    const { context } = this;
    for (const row of this.marked) this.#ring(row, 6, 2, ink);
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
    const thumb = this.thumbnail(row);
    const [x, y] = this.toScreen(row);
    context.beginPath();
    if (thumb) context.rect(thumb[0] - 1, thumb[1] - 1, thumb[2] + 2, thumb[2] + 2);
    else context.arc(x, y, radius, 0, 7);
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.stroke();
  }

  // --- what is where -----------------------------------------------------------------------------------

  // The image at a place on the screen: the thumbnail there, else the nearest point within reach; -1: none.
  at(px, py, reach = 14) {
    const on = (row) => {
      const [left, top, size] = this.thumbnail(row);
      return px >= left && py >= top && px < left + size && py < top + size;
    };
    if (this.large && on(this.selected)) return this.selected;
    for (const row of this.scene.shown.keys()) if (on(row)) return row;
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

  // Pans to and fro, further than the margin of the bitmap, for so many frames, and says what they took: milliseconds
  // from frame to frame, milliseconds of script, and how many of them were more than a copy of the bitmap.
  async measure(frames = 120) {
    const kept = { ...this.camera };
    const [work, apart] = [[], []];
    const renders = this.scene.renders;
    let before = await new Promise(requestAnimationFrame);
    for (let i = 0; i < frames; i++) {
      const angle = (2 * Math.PI * i) / frames;
      this.camera.x = kept.x + (0.4 * this.w * Math.sin(angle)) / kept.scale;
      this.camera.y = kept.y + (0.2 * this.h * Math.sin(2 * angle)) / kept.scale;
      this.paint();
      work.push(this.work.at(-1));
      const now = await new Promise(requestAnimationFrame);
      apart.push(now - before);
      before = now;
    }
    const made = this.scene.renders - renders;
    this.camera = kept;
    this.paint();
    const at = (list, share) => list.toSorted((a, b) => a - b)[Math.floor((list.length - 1) * share)];
    const script = { median: at(work, 0.5), p95: at(work, 0.95) };
    const frame = { median: at(apart, 0.5), p95: at(apart, 0.95) };
    return { points: this.count, thumbnails: this.scene.shown.size, frames, renders: made, script, frame, fps: 1000 / frame.median };
  }
}

function bounds(x, y) {
  const span = (values) => values.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [1, 0]);
  const [[left, right], [top, bottom]] = [span(x), span(y)];
  return { x: (left + right) / 2, y: (top + bottom) / 2, across: Math.max(right - left, 1e-3), down: Math.max(bottom - top, 1e-3) };
}
