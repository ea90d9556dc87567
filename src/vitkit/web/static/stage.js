// The image under a map, with its patches: drawn on a canvas, pointed at with mouse, finger or keys.

import { range, scale } from "./colours.js";
import { el } from "./dom.js";

const FINEST = 1080; // pixels that are blended along the longer side
let number = 0;

export class Stage {
  constructor(parent, on) {
    const id = `readout-${++number}`;
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-describedby": id });
    this.frame = el("div", { class: "frame" }, this.canvas);
    this.title = el("b");
    this.note = el("span");
    this.words = el("span", { id, role: "status" });
    this.free = el("button", { class: "quiet", type: "button", onclick: () => on.pick(null) }, "Show the output");
    const readout = el("div", { class: "readout" }, this.words, this.free);
    const caption = el("figcaption", {}, this.title, this.note);
    this.figure = el("figure", { class: "card stage" }, caption, this.frame, readout);
    parent.append(this.figure);
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
    this.base = null;
    this.#listen(on);
    new ResizeObserver(() => this.#fit()).observe(this.frame);
  }

  remove() {
    this.figure.remove();
  }

  // `seen`: the pixels that the model gets, instead of the photograph.
  show(look, seen) {
    const bitmap = seen || !look.photo ? look.seen : look.photo.bitmap;
    if (this.look === look && this.bitmap === bitmap) return;
    if (this.look !== look) this.last = null; // a map of another image must never lie over this one
    Object.assign(this, { look, bitmap });
    this.canvas.setAttribute("aria-label", this.#label());
    this.#fit(true);
  }

  #label() {
    if (!this.look.model.explainable) return "The image as the model sees it.";
    const { h, w } = this.look;
    return `The image in ${h} rows and ${w} columns of patches. Arrow keys choose a patch, Escape shows the output, [ and ] change the layer.`;
  }

  // The canvas takes the room there is; the image's own pixels are kept apart for blending.
  #fit(again = false) {
    if (!this.look) return;
    const { width, height } = this.bitmap;
    const room = this.frame.clientWidth || 300;
    const tall = Math.max(260, Math.min(700, window.innerHeight * 0.6));
    const shown = Math.round(Math.min(room, (tall * width) / height));
    const ratio = Math.min(window.devicePixelRatio || 1, FINEST / Math.max(shown, (shown * height) / width));
    const fine = Math.max(16, Math.round(shown * ratio));
    if (!again && this.canvas.width === fine && this.shown === shown) return;
    this.shown = shown;
    this.canvas.style.width = `${shown}px`;
    this.canvas.width = fine;
    this.canvas.height = Math.max(16, Math.round((fine * height) / width));
    this.context.imageSmoothingEnabled = Math.max(width, height) > 64;
    this.context.imageSmoothingQuality = "high";
    this.context.drawImage(this.bitmap, 0, 0, fine, this.canvas.height);
    this.base = this.context.getImageData(0, 0, fine, this.canvas.height);
    this.draw(this.last);
  }

  draw(what) {
    this.last = what;
    if (!this.base || !what) return;
    const { values, strength, smooth, grid, patch, pinned } = what;
    const { h, w } = this.look;
    this.context.putImageData(values ? blend(this.base, values, h, w, strength, smooth) : this.base, 0, 0);
    if (grid && h) this.#lines(h, w);
    if (patch !== null && h) this.#mark(patch, h, w, pinned);
  }

  #lines(h, w) {
    const { context, canvas } = this;
    context.lineWidth = Math.max(1, canvas.width / 700);
    context.strokeStyle = "rgb(255 255 255 / 22%)";
    context.beginPath();
    for (let i = 1; i < h; i++) {
      const y = Math.round((i * canvas.height) / h) + 0.5;
      context.moveTo(0, y);
      context.lineTo(canvas.width, y);
    }
    for (let j = 1; j < w; j++) {
      const x = Math.round((j * canvas.width) / w) + 0.5;
      context.moveTo(x, 0);
      context.lineTo(x, canvas.height);
    }
    context.stroke();
  }

  #mark(patch, h, w, pinned) {
    const { context, canvas } = this;
    const [tall, wide] = [canvas.height / h, canvas.width / w];
    const unit = canvas.width / this.shown;
    const box = [(patch % w) * wide, Math.floor(patch / w) * tall, wide, tall];
    for (const [width, colour] of [[6 * unit, "rgb(0 0 0 / 65%)"], [3 * unit, pinned ? "#4dd8ff" : "#ffffff"]]) {
      context.lineWidth = width;
      context.strokeStyle = colour;
      context.strokeRect(...box);
    }
  }

  #listen(on) {
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const { h, w } = this.look;
      const row = Math.floor(((event.clientY - box.top) / box.height) * h);
      const column = Math.floor(((event.clientX - box.left) / box.width) * w);
      return row >= 0 && row < h && column >= 0 && column < w ? row * w + column : null;
    };
    const can = () => this.look?.model.explainable;
    this.canvas.addEventListener("pointermove", (event) => can() && on.hover(this, at(event)));
    this.canvas.addEventListener("pointerleave", () => can() && on.hover(this, null));
    this.canvas.addEventListener("click", (event) => can() && on.pick(this, at(event)));
    this.canvas.addEventListener("keydown", (event) => can() && on.key(this, event));
  }
}

// 0 shows the image alone, 1 the map most: the same formula as the server's PNG.
export function blend(base, values, h, w, strength, smooth) {
  const { width, height } = base;
  const out = new ImageData(width, height);
  const table = scale();
  const [least, most] = range(values);
  const across = places(width, w, smooth);
  const down = places(height, h, smooth);
  for (let y = 0, i = 0; y < height; y++) {
    const { first, second, share } = down;
    const [top, bottom, v] = [first[y] * w, second[y] * w, share[y]];
    for (let x = 0; x < width; x++, i += 4) {
      const [a, b, u] = [across.first[x], across.second[x], across.share[x]];
      const upper = values[top + a] + u * (values[top + b] - values[top + a]);
      const lower = values[bottom + a] + u * (values[bottom + b] - values[bottom + a]);
      const level = Math.max(0, Math.min(1, (upper + v * (lower - upper) - least) / (most - least)));
      const cover = strength * (0.35 + 0.65 * level);
      const k = 3 * Math.round(level * 255);
      const grey = 0.299 * base.data[i] + 0.587 * base.data[i + 1] + 0.114 * base.data[i + 2];
      for (let c = 0; c < 3; c++) {
        const under = base.data[i + c] + strength * (grey - base.data[i + c]);
        out.data[i + c] = under + cover * (table[k + c] - under);
      }
      out.data[i + 3] = 255;
    }
  }
  return out;
}

// For every pixel along one side: the two patches it lies between, and how near to the second.
function places(pixels, patches, smooth) {
  const first = new Int32Array(pixels);
  const second = new Int32Array(pixels);
  const share = new Float32Array(pixels);
  for (let i = 0; i < pixels; i++) {
    const at = ((i + 0.5) * patches) / pixels - 0.5;
    const nearest = Math.max(0, Math.min(patches - 1, Math.round(at)));
    const below = Math.max(0, Math.min(patches - 1, Math.floor(at)));
    first[i] = smooth ? below : nearest;
    second[i] = smooth ? Math.min(patches - 1, below + 1) : nearest;
    share[i] = smooth ? Math.max(0, Math.min(1, at - below)) : 0;
  }
  return { first, second, share };
}
