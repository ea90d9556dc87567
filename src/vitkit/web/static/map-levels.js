// Which images are shown as thumbnails at a zoom: as many as fit without lying on each other.

const DEEPEST = 14;

export class Levels {
  // `order`: the images, those that should be seen first in front.
  constructor(x, y, order) {
    Object.assign(this, { x, y, order });
    this.made = new Map();
    let size = 1;
    while (size < 2 * order.length + 2) size *= 2;
    this.keys = new Int32Array(size);
    this.rows = new Int32Array(size);
  }

  // The level whose distance is at least `least` pixels on the screen at this scale.
  at(scale, least) {
    return Math.max(0, Math.min(DEEPEST, Math.floor(Math.log2(scale / least))));
  }

  // Images that are at least 2^-level apart, across or down: a later one only where no earlier one is near.
  get(level) {
    if (!this.made.has(level)) this.made.set(level, this.#make(level));
    return this.made.get(level);
  }

  #make(level) {
    const { x, y, order, keys, rows } = this;
    const side = 2 ** level;
    const apart = 1 / side;
    const mask = keys.length - 1;
    const taken = [];
    keys.fill(-1);
    const place = (key) => {
      let at = Math.imul(key, 0x9e3779b1) & mask;
      while (keys[at] !== -1 && keys[at] !== key) at = (at + 1) & mask;
      return at;
    };
    for (const row of order) {
      const [cx, cy] = [Math.min(side - 1, Math.floor(x[row] * side)), Math.min(side - 1, Math.floor(y[row] * side))];
      let free = true;
      for (let dy = -1; free && dy <= 1; dy++) for (let dx = -1; dx <= 1; dx++) {
        const [nx, ny] = [cx + dx, cy + dy];
        if (nx < 0 || ny < 0 || nx >= side || ny >= side) continue;
        const at = place(ny * side + nx);
        if (keys[at] === -1) continue;
        const other = rows[at];
        if (Math.abs(x[other] - x[row]) < apart && Math.abs(y[other] - y[row]) < apart) {
          free = false;
          break;
        }
      }
      if (!free) continue;
      const at = place(cy * side + cx);
      keys[at] = cy * side + cx;
      rows[at] = row;
      taken.push(row);
    }
    return Int32Array.from(taken);
  }
}
