// One image in one model: asks the server for maps when they are first needed, and keeps them.
//
// Shapes: L layers, H heads, N patches on a grid (h, w).

import { explain } from "./api.js";

const LARGEST_LAYER = 8 * 2 ** 20; // bytes; above it heads are fetched one by one
const LARGEST_AHEAD = 48 * 2 ** 20; // bytes; above it only what is looked at is fetched
const MOST_PINNED = 8; // patches that were clicked and whose maps are kept

export class Look {
  // `seen` is the image as the model sees it, `photo` the same part of the file itself or null, `name` the file's.
  constructor(model, png, seen, photo, name, ranked, on) {
    Object.assign(this, { model, png, seen, photo, name, ranked, on });
    this.kept = new Map();
    this.stop = new AbortController();
    if (model.explainable) {
      [this.h, this.w] = model.grid;
      this.n = this.h * this.w;
      this.byHead = model.heads * this.n ** 2 * 4 > LARGEST_LAYER;
    }
  }

  close() {
    this.stop.abort();
    this.seen.close();
    this.photo?.bitmap.close();
  }

  // Values that have arrived, or null; with `fetch`, what is missing is asked for.
  get(key, fields, fetch = true) {
    const known = this.kept.get(key);
    if (known || !fetch) return known?.values ?? null;
    const entry = { values: null };
    entry.promise = explain({ model: this.model.name, ...fields }, this.png, this.stop.signal).then(
      (answer) => {
        entry.values = answer.values;
        this.on.arrived();
      },
      (error) => {
        this.kept.delete(key);
        if (error.name !== "AbortError") this.on.failed(error);
      },
    );
    this.kept.set(key, entry);
    return null;
  }

  // The map that is asked for: N values, or null while it is on its way. A patch that is `pinned` is asked for by
  // itself, in all layers and heads at once; one that is pointed at together with all others of its layer.
  map(asked, fetch = true) {
    const { method, layer, head, patch, cls, pinned } = asked;
    const { n, model } = this;
    if (method === "relevance" || method === "gradcam") {
      return model.outputs.names.length ? this.get(`${method} ${cls}`, { method, class: `#${cls}` }, fetch) : null;
    }
    if (patch !== null) {
      const near = this.#ofPatch(asked, fetch && !pinned);
      return near ?? (pinned ? this.#ofPinned(asked, fetch) : null);
    }
    if (method === "rollout") return part(this.get("rollout", { method, layer: "all" }, fetch), layer, n);
    const all = this.get("output", { method, layer: "all", head: "all" }, fetch);
    return all && this.#ofHead((h) => all.subarray((layer * model.heads + h) * n), head);
  }

  #ofPatch({ method, layer, head, patch }, fetch) {
    const { n } = this;
    if (method === "rollout") return part(this.get(`rollout ${layer}`, { method, layer, query: "all" }, fetch), patch, n);
    if (this.byHead) return part(this.get(`patch ${layer} ${head}`, { method, layer, head, query: "all" }, fetch), patch, n);
    const all = this.get(`patch ${layer}`, { method, layer, head: "all", query: "all" }, fetch);
    return all && this.#ofHead((h) => all.subarray((h * n + patch) * n), head);
  }

  #ofPinned({ method, layer, head, patch }, fetch) {
    const { n, model } = this;
    const query = `${Math.floor(patch / this.w)},${patch % this.w}`;
    if (fetch) this.#forget(`pinned ${method} ${query}`);
    const fields = { method, layer: "all", query, ...(method === "rollout" ? {} : { head: "all" }) };
    const all = this.get(`pinned ${method} ${query}`, fields, fetch);
    if (method === "rollout") return part(all, layer, n);
    return all && this.#ofHead((h) => all.subarray((layer * model.heads + h) * n), head);
  }

  // The oldest of the patches that were clicked, when there are many.
  #forget(but) {
    const pinned = [...this.kept.keys()].filter((key) => key.startsWith("pinned ") && key !== but);
    pinned.slice(0, Math.max(0, pinned.length + 1 - MOST_PINNED)).forEach((key) => this.kept.delete(key));
  }

  #ofHead(from, head) {
    if (head !== "mean") return from(Number(head)).subarray(0, this.n);
    const mean = new Float32Array(this.n);
    for (let h = 0; h < this.model.heads; h++) {
      const one = from(h);
      for (let i = 0; i < this.n; i++) mean[i] += one[i] / this.model.heads;
    }
    return mean;
  }

  // Everything that hovering and playing will need, one after the other, the current layer first.
  async ahead(method, first) {
    const { model, n } = this;
    if (method === "relevance" || method === "gradcam") {
      for (const rank of this.ranked) {
        if (this.stop.signal.aborted) return;
        this.map({ method, cls: rank.class });
        await this.kept.get(`${method} ${rank.class}`)?.promise;
      }
      return;
    }
    const perLayer = n * n * 4 * (method === "rollout" ? 1 : model.heads);
    if (this.byHead || perLayer * model.depth > LARGEST_AHEAD) return;
    for (let k = 0; k < model.depth && !this.stop.signal.aborted; k++) {
      const layer = (first + k) % model.depth;
      this.map({ method, layer, head: "mean", patch: 0, pinned: false });
      await this.kept.get(method === "rollout" ? `rollout ${layer}` : `patch ${layer}`)?.promise;
    }
  }
}

const part = (values, index, size) => values && values.subarray(index * size, (index + 1) * size);
