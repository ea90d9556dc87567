// The map as a bitmap, wider than the screen: while it is panned, a frame is one copy of that bitmap and nothing else.
//
// Points are written into the pixels directly, which costs a fraction of drawing shapes and needs no graphics card.
// It is drawn again when something else than the place changed, or when the place has left its margin.

import { Levels } from "./map-levels.js";

const SMALLEST = 24; // pixels of a thumbnail in the view of all; they grow with the zoom
const LARGEST = 132; // pixels of a thumbnail, when the map is zoomed in all the way
const FADED = 0x30; // alpha of points that are not highlighted
const MARGIN = 0.25; // of the screen, beyond each edge

export class Scene {
  constructor(store) {
    this.store = store;
    const { x, y, slot } = store.points;
    const order = new Int32Array(x.length);
    slot.forEach((at, row) => { order[at] = row; });
    Object.assign(this, { x, y, slot, levels: new Levels(x, y, order) });
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
    this.made = null; // what it was made for
    this.shown = new Map(); // row -> [left, top, size] of its thumbnail, on the screen when it was made
    this.renders = 0;
  }

  // How far the map has moved since, in pixels of the device.
  moved(view) {
    const { camera, ratio } = this.made;
    const by = (axis) => Math.round((camera[axis] - view.camera[axis]) * camera.scale * ratio);
    return [by("x"), by("y")];
  }

  // Makes it if need be, and says where its corner lies on the screen, in pixels of the device.
  place(view) {
    if (!this.#fits(view)) this.#render(view);
    const [dx, dy] = this.moved(view);
    return [dx - this.made.margin[0], dy - this.made.margin[1]];
  }

  #fits(view) {
    const { made } = this;
    if (!made || !parts(view).every((part, i) => part === made.parts[i])) return false;
    const [dx, dy] = this.moved(view);
    return Math.abs(dx) <= made.margin[0] && Math.abs(dy) <= made.margin[1];
  }

  #render(view) {
    const { width, height } = view.canvas;
    const margin = [Math.round(width * MARGIN), Math.round(height * MARGIN)];
    const [wide, high] = [width + 2 * margin[0], height + 2 * margin[1]];
    if (wide !== this.canvas.width || high !== this.canvas.height || !this.pixels) {
      Object.assign(this.canvas, { width: wide, height: high });
      this.pixels = new ImageData(wide, high);
      this.words = new Uint32Array(this.pixels.data.buffer);
    }
    this.made = { camera: { ...view.camera }, ratio: view.ratio, margin, parts: parts(view) };
    this.renders += 1;
    this.#points(view);
    this.context.putImageData(this.pixels, 0, 0);
    this.context.setTransform(view.ratio, 0, 0, view.ratio, margin[0], margin[1]); // the screen's own coordinates
    this.shown = new Map();
    if (view.images) this.#thumbnails(view);
    this.context.setTransform(1, 0, 0, 1, 0, 0);
  }

  #points(view) {
    const { words, x, y } = this;
    const { colours, lit, camera, ratio, count } = view;
    const { width, height } = this.canvas;
    const scale = camera.scale * ratio;
    const [left, top] = [width / 2 - camera.x * scale, height / 2 - camera.y * scale];
    const zoomed = Math.log2(camera.scale / view.whole + 1);
    const crowd = Math.max(0.8, Math.min(2.4, 260 / Math.sqrt(count)));
    const stencil = disc(Math.min(6, crowd + 0.7 * zoomed) * ratio, width);
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

  #thumbnails(view) {
    const { context } = this;
    const { camera, w, h, lit, colours } = view;
    const zoomed = Math.log2(Math.max(1, camera.scale / view.whole));
    const level = this.levels.at(camera.scale, Math.min(SMALLEST + 8 * zoomed, 56));
    const size = Math.min(LARGEST, (camera.scale / 2 ** level) * 0.94);
    this.size = size;
    context.lineWidth = 2;
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "medium";
    const [beyondX, beyondY] = [w * MARGIN, h * MARGIN];
    for (const row of this.levels.get(level)) {
      const left = (this.x[row] - camera.x) * camera.scale + w / 2 - size / 2;
      const top = (this.y[row] - camera.y) * camera.scale + h / 2 - size / 2;
      if (left < -size - beyondX || top < -size - beyondY || left > w + beyondX || top > h + beyondY) continue;
      if (lit && !lit[row]) continue;
      if (this.thumbnail(context, row, left, top, size, colours)) this.shown.set(row, [left, top, size]);
    }
  }

  // False while its sheet is on the way.
  thumbnail(context, row, left, top, size, colours) {
    const { tile, sheet_columns: columns } = this.store.about;
    const slot = this.slot[row];
    const sheet = this.store.sheets.take(Math.floor(slot / (columns * columns)));
    if (!sheet) return false;
    const at = slot % (columns * columns);
    context.drawImage(sheet, (at % columns) * tile, Math.floor(at / columns) * tile, tile, tile, left, top, size, size);
    context.strokeStyle = `#${hex(colours[row])}`;
    context.strokeRect(left + 1, top + 1, size - 2, size - 2);
    return true;
  }
}

// What the bitmap depends on, besides the place.
const parts = (view) => [view.camera.scale, view.colours, view.lit, view.images, view.arrivals, view.canvas.width, view.canvas.height];

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
