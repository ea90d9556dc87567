// Mouse, touch and pen on the map: drag and pinch, wheel, hover, click, lasso.

const STILL = 5; // pixels that a click may move

export function takeHands(view) {
  const { canvas } = view;
  const down = new Map(); // pointer -> where it is
  let [moved, start] = [0, null];

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const spread = () => {
    const [[ax, ay], [bx, by]] = [...down.values()];
    return { away: Math.hypot(ax - bx, ay - by), x: (ax + bx) / 2, y: (ay + by) / 2 };
  };

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button > 0) return;
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, at(event));
    if (down.size === 1) [moved, start] = [0, at(event)];
    if (view.lassoing && down.size === 1) view.line = [at(event)];
    canvas.classList.toggle("held", !view.lassoing);
    view.calls.hover(-1);
  });

  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = at(event);
    if (!down.has(event.pointerId)) return event.pointerType === "mouse" ? view.calls.hover(view.at(x, y), x, y) : undefined;
    const [fromX, fromY] = down.get(event.pointerId);
    if (down.size === 2) {
      const before = spread();
      down.set(event.pointerId, [x, y]);
      const now = spread();
      view.line = null;
      view.pan(now.x - before.x, now.y - before.y);
      if (before.away > 8) view.zoom(now.away / before.away, now.x, now.y);
      moved = Infinity;
      return undefined;
    }
    down.set(event.pointerId, [x, y]);
    moved = Math.max(moved, Math.hypot(x - start[0], y - start[1]));
    if (view.line) {
      view.line.push([x, y]);
      return view.draw();
    }
    return moved > STILL ? view.pan(x - fromX, y - fromY) : undefined;
  });

  const up = (event) => {
    if (!down.delete(event.pointerId)) return;
    canvas.classList.toggle("held", false);
    if (down.size) return;
    const { line } = view;
    view.line = null;
    if (line && line.length > 3 && moved > STILL) return view.calls.lasso(view.inside(line));
    if (event.type === "pointerup" && moved <= STILL) view.calls.pick(view.at(...at(event), event.pointerType === "mouse" ? 14 : 24));
    view.draw();
  };
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", up);
  canvas.addEventListener("pointerleave", () => view.calls.hover(-1));

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const lines = event.deltaMode === 1 ? 20 : 1; // some mice count lines
    view.zoom(2 ** (-event.deltaY * lines * (event.ctrlKey ? 0.012 : 0.0025)), ...at(event));
  }, { passive: false });
}
