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

// The least and the most of a map. A map that is alike everywhere is all "least": noise must not look like a finding.
export function range(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return most - least > 1e-3 * Math.abs(most) ? [least, most] : [most, most + 1];
}
