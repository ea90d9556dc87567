// From dark to bright: 256 colours, interpolated between the stops that the server draws with too.

let scales = {};

export async function loadColours() {
  const stops = await (await fetch("/static/colours.json")).json();
  for (const [name, list] of Object.entries(stops)) {
    const table = new Uint8ClampedArray(256 * 3);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (list.length - 1);
      const k = Math.min(list.length - 2, Math.floor(at));
      for (let c = 0; c < 3; c++) table[3 * i + c] = list[k][c] + (at - k) * (list[k + 1][c] - list[k][c]);
    }
    scales[name] = table;
  }
}

export const scale = (name = "magma") => scales[name];

// Draw values in low..high as blocks, one pixel each.
export function paint(canvas, values, height, width, low, high, name = "magma") {
  canvas.width = width;
  canvas.height = height;
  const image = new ImageData(width, height);
  const table = scales[name];
  const range = Math.max(high - low, 1e-12);
  for (let i = 0; i < width * height; i++) {
    const k = 3 * Math.max(0, Math.min(255, Math.round(((values[i] - low) / range) * 255)));
    image.data.set([table[k], table[k + 1], table[k + 2], 255], 4 * i);
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const TOP = 0.98; // quantile of the brightest colour, as in figures/overlay.py: one outlier patch would leave the rest black

// The least of a map, and its quantile TOP. A map that is alike everywhere is all "least": noise must not look like a finding.
export function range(values) {
  const sorted = Float32Array.from(values).sort();
  const [least, last] = [sorted[0], sorted[sorted.length - 1]];
  const at = TOP * (sorted.length - 1);
  const below = sorted[Math.floor(at)];
  const quantile = below + (at - Math.floor(at)) * (sorted[Math.ceil(at)] - below);
  const differs = (most) => most - least > 1e-3 * Math.abs(most);
  return differs(quantile) ? [least, quantile] : differs(last) ? [least, last] : [last, last + 1];
}
