// Where the map comes from: the server, or this very file when it was made for sharing. One shape for both.

import { Refused, bytes, get, parseNpy, post } from "./api.js";

const AT_ONCE = 4; // sheets on their way
const KEPT = 48; // sheets in memory, 3.7 MB each

const decoded = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

export async function openStore() {
  const inside = document.getElementById("embedded");
  return inside ? embedded(JSON.parse(inside.textContent)) : served();
}

function columns(about, buffer) {
  const { shape: [, count], values } = parseNpy(buffer);
  return Object.fromEntries(about.columns.map((name, i) => [name, values.subarray(i * count, (i + 1) * count)]));
}

async function served() {
  const about = await get("data");
  const [points, names, issues] = await Promise.all([bytes("data/points"), get("data/names"), get("data/issues")]);
  const sheets = new Sheets((n) => bytes(`data/sheet`, { number: n }));
  return {
    about, points: columns(about, points), names, issues, sheets,
    image: async (row, signal) => new Blob([await bytes("data/image", { row, size: 512 }, signal)], { type: "image/jpeg" }),
    neighbours: async (row, signal) => (await get("data/neighbours", { row, top: 12 }, signal)).neighbours,
    search: async (blob) => (await (await post("data/search", { top: 24 }, blob)).json()).neighbours,
  };
}

function embedded(held) {
  const near = new Int32Array(decoded(held.neighbours).buffer);
  const each = near.length / held.about.count;
  return {
    about: held.about, points: columns(held.about, decoded(held.points).buffer), names: held.names, issues: held.issues,
    sheets: new Sheets(async (n) => decoded(held.sheets[n]).buffer),
    image: null, search: null,
    neighbours: async (row) => Array.from(near.subarray(row * each, row * each + Math.min(12, each)), (other) => ({ row: other })),
  };
}

// Sheets of thumbnails: fetched when one is wanted, a few at a time; the longest unused are let go.
class Sheets {
  constructor(fetch) {
    this.fetch = fetch;
    this.held = new Map(); // number -> bitmap, the last used last
    this.wanted = new Set();
    this.coming = new Set();
    this.arrived = () => {};
    this.failed = () => {};
  }

  // The bitmap, or null while it is not there.
  take(n) {
    const bitmap = this.held.get(n);
    if (bitmap) {
      this.held.delete(n);
      this.held.set(n, bitmap);
      return bitmap;
    }
    if (!this.coming.has(n)) this.wanted.add(n);
    return null;
  }

  // Called once a frame: what was wanted in it is fetched, what earlier frames wanted is not.
  settle() {
    for (const n of this.wanted) {
      if (this.coming.size >= AT_ONCE) break;
      this.coming.add(n);
      this.#load(n);
    }
    this.wanted.clear();
  }

  get busy() {
    return this.coming.size > 0;
  }

  async #load(n) {
    try {
      const bitmap = await createImageBitmap(new Blob([await this.fetch(n)], { type: "image/jpeg" }));
      this.held.set(n, bitmap);
      if (this.held.size > KEPT) {
        const [oldest] = this.held.keys();
        this.held.get(oldest).close();
        this.held.delete(oldest);
      }
    } catch (error) {
      this.held.set(n, await createImageBitmap(new ImageData(1, 1))); // asked once: a gap, not a storm of requests
      this.failed(error instanceof Refused ? error : new Refused("Some thumbnails cannot be read."));
    }
    this.coming.delete(n);
    this.arrived();
  }
}
