// What the points are coloured by: a colour for each, and what the legend says.

const HUES = [
  [91, 124, 222], [232, 125, 54], [76, 165, 92], [212, 73, 88], [148, 103, 205], [160, 110, 80], [222, 119, 190],
  [178, 170, 55], [43, 178, 196], [140, 140, 155], [30, 110, 160], [245, 175, 70], [140, 200, 90], [245, 140, 140],
  [190, 160, 235], [120, 70, 40], [160, 50, 120], [100, 115, 20], [20, 125, 115], [90, 60, 130],
];
const NOTHING = [128, 124, 138];
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

const pack = ([r, g, b], alpha = 255) => ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

export function hue(i) {
  if (i < 0) return NOTHING;
  if (i < HUES.length) return HUES[i];
  const angle = (i * 137.508) % 360; // the golden angle: no two near each other
  const part = (k) => Math.round(255 * (0.55 - 0.28 * Math.cos(((angle + k) * Math.PI) / 180)));
  return [part(0), part(120), part(240)];
}

function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1);
  const k = Math.min(RAMP.length - 2, Math.floor(at));
  return RAMP[k].map((from, c) => Math.round(from + (at - k) * (RAMP[k + 1][c] - from)));
}

const TITLES = { label: "Class", split: "Split", prediction: "Prediction (k-NN)", loss: "Loss (k-NN)", issue: "Issue" };

// The ways to colour that this set has: [column, title].
export function choices(about) {
  return about.columns.filter((name) => name in TITLES && (name === "loss" || about.values[name].length)).map((name) => [name, TITLES[name]]);
}

// Colours (one number each) and legend entries ({ value, name, colour, count }) of a column; a ramp where it is a number.
export function colour(about, points, name) {
  const column = points[name];
  const colours = new Uint32Array(column.length);
  if (name === "loss") {
    const sorted = Float32Array.from(column).sort();
    const [low, high] = [sorted[0], sorted[Math.floor(0.99 * (sorted.length - 1))]];
    for (let i = 0; i < column.length; i++) colours[i] = pack(ramp((column[i] - low) / Math.max(high - low, 1e-9)));
    return { colours, ramp: { low, high, at: ramp }, entries: [] };
  }
  const counts = new Map();
  for (let i = 0; i < column.length; i++) {
    colours[i] = pack(hue(column[i]));
    counts.set(column[i], (counts.get(column[i]) ?? 0) + 1);
  }
  const entries = about.values[name].map((word, value) => ({ value, name: word, colour: hue(value), count: counts.get(value) ?? 0 }));
  if (counts.has(-1)) entries.push({ value: -1, name: "none", colour: NOTHING, count: counts.get(-1) });
  return { colours, ramp: null, entries: entries.filter((entry) => entry.count) };
}
