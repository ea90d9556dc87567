// The photograph itself, at its own resolution: the part of it that the model sees, so that maps lie where they belong.

const LARGEST = 2048; // pixels kept along the longer side: more than a screen shows of it

// What `prepare` of vitkit.data cuts out, in pixels of the photograph: left, top, width, height.
export function seenPart(width, height, { fit, crop, image_size: [tall, wide] }) {
  const goal = [Math.floor(tall / crop), Math.floor(wide / crop)];
  let [h, w] = goal; // what it is resized to before the centre is cut out
  if (fit !== "squash") {
    const ratio = Math.min(height / goal[0], width / goal[1]);
    [h, w] = [Math.max(goal[0], height / ratio), Math.max(goal[1], width / ratio)];
  }
  const [down, across] = [tall / h, wide / w];
  return [(width * (1 - across)) / 2, (height * (1 - down)) / 2, width * across, height * down];
}

// { bitmap, size }: that part, and the size of the whole; null where the browser cannot read such a file.
export async function photoOf(blob, model) {
  const whole = await createImageBitmap(blob).catch(() => null);
  if (!whole) return null;
  const size = [whole.width, whole.height];
  const [left, top, width, height] = seenPart(...size, model);
  const scale = Math.min(1, LARGEST / Math.max(width, height));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height].map((n) => Math.max(1, Math.round(n * scale)));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  if (model.channels === 1) context.filter = "grayscale(1)";
  context.drawImage(whole, left, top, width, height, 0, 0, canvas.width, canvas.height);
  whole.close();
  return { bitmap: await createImageBitmap(canvas), size };
}
