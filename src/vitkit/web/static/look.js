// One image in one model: asks the server for maps when they are first needed, and keeps them.
//
// Shapes: L layers, H heads, N patches on a grid (h, w).

import { explain } from "./api.js";

const LARGEST_LAYER = 8 * 2 ** 20; // bytes; above it heads are fetched one by one
const LARGEST_AHEAD = 48 * 2 ** 20; // bytes; above it only what is looked at is fetched

export class Look {
  constructor(model, png, bitmap, ranked, arrived, failed) {
    Object.assign(this, { model, png, bitmap, ranked, arrived, failed });
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
    this.bitmap.close();
  }

  // Values that have arrived, or null; with `fetch`, what is missing is asked for.
  get(key, fields, fetch = true) {
    const known = this.kept.get(key);
    if (known || !fetch) return known?.values ?? null;
    const entry = { values: null };
    entry.promise = explain({ model: this.model.name, ...fields }, this.png, this.stop.signal).then(
      (answer) => {
        entry.values = answer.values;
        this.arrived();
      },
      (error) => {
        this.kept.delete(key);
        if (error.name !== "AbortError") this.failed(error);
      },
    );
    this.kept.set(key, entry);
    return null;
  }

  // The map that is asked for: N values, or null while it is on its way.
  map({ method, layer, head, patch, cls }, fetch = true) {
    const { n, model } = this;
    if (method === "relevance" || method === "gradcam") {
      return model.outputs.names.length ? this.get(`${method} ${cls}`, { method, class: `#${cls}` }, fetch) : null;
    }
    if (method === "rollout") {
      if (patch === null) return part(this.get("rollout", { method, layer: "all" }, fetch), layer, n);
      return part(this.get(`rollout ${layer}`, { method, layer, query: "all" }, fetch), patch, n);
    }
    if (patch === null) {
      const all = this.get("output", { method, layer: "all", head: "all" }, fetch);
      return all && this.#ofHead((h) => all.subarray((layer * model.heads + h) * n), head);
    }
    if (this.byHead) return part(this.get(`patch ${layer} ${head}`, { method, layer, head, query: "all" }, fetch), patch, n);
    const all = this.get(`patch ${layer}`, { method, layer, head: "all", query: "all" }, fetch);
    return all && this.#ofHead((h) => all.subarray((h * n + patch) * n), head);
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
      this.map({ method, layer, head: "mean", patch: 0 });
      await this.kept.get(method === "rollout" ? `rollout ${layer}` : `patch ${layer}`)?.promise;
    }
  }
}

const part = (values, index, size) => values && values.subarray(index * size, (index + 1) * size);
