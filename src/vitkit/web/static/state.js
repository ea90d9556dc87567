// What is shown, kept in the address after #, so that a view can be bookmarked and sent. Never the image.

const DEFAULTS = {
  tab: "image", method: "attention", layer: "", head: "mean", class: "", versus: "", other: "", patch: "",
  strength: "75", grid: "1", smooth: "1", seen: "0", example: "", model: "", second: "",
};
const ALLOWED = {
  tab: /^(image|filters|positions|distance|layers|api)$/, method: /^(attention|rollout|relevance|gradcam)$/,
  layer: /^\d{0,4}$/, head: /^(mean|\d{1,4})$/, class: /^\d{0,6}$/, versus: /^(class|model|)$/, other: /^\d{0,6}$/,
  patch: /^(\d{1,4},\d{1,4})?$/, strength: /^(\d|[1-9]\d|100)$/, grid: /^[01]$/, smooth: /^[01]$/, seen: /^[01]$/, example: /^[a-z]{0,20}$/,
  model: /^.{0,200}$/, second: /^.{0,200}$/, // names of models
};

export const state = { ...DEFAULTS };
let listener = () => {};

export function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, standard] of Object.entries(DEFAULTS)) {
    const value = given.get(name);
    state[name] = value !== null && ALLOWED[name].test(value) ? value : standard;
  }
}

export function set(changes) {
  let changed = false;
  for (const [name, value] of Object.entries(changes)) {
    if (state[name] !== String(value)) {
      state[name] = String(value);
      changed = true;
    }
  }
  if (!changed) return;
  const kept = Object.entries(state).filter(([name, value]) => value !== DEFAULTS[name]);
  const hash = new URLSearchParams(kept).toString().replaceAll("%2C", ",");
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname);
  listener(changes);
}

export function onChange(call) {
  listener = call;
  window.addEventListener("hashchange", () => {
    readAddress();
    listener(state);
  });
}
