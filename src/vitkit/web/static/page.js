// What all pages share: sentences for what went wrong, the theme, files that are dropped or pasted.

import { Refused } from "./api.js";
import { $, el } from "./dom.js";

export function complain(error) {
  if (error.name === "AbortError") return;
  if (!(error instanceof Refused)) console.error(error);
  const words = error instanceof Refused ? error.message : `Something went wrong on this page: ${error.message}`;
  if ([...$("errors").children].some((p) => p.firstChild.textContent === words)) return;
  const line = el("p", {}, el("span", {}, words), el("button", { type: "button", "aria-label": "Dismiss", onclick: () => line.remove() }, "×"));
  $("errors").append(line);
}

export const quietly = (promise) => promise.catch(complain);

export function checkSize(blob, limit) {
  if (blob.size > limit) throw new Refused(`The image has ${(blob.size / 2 ** 20).toFixed(1)} MB; this server takes up to ${(limit / 2 ** 20).toFixed(1)} MB.`);
  if (blob.size === 0) throw new Refused("The file is empty.");
}

// Calls open(file) for what is chosen in `input`, dropped or pasted anywhere.
export function wireFiles(input, open) {
  input.addEventListener("change", (event) => {
    const [chosen] = event.target.files;
    if (chosen) quietly(open(chosen));
    event.target.value = ""; // so that the same file can be chosen again
  });
  let inside = 0;
  const veil = (on) => $("veil").classList.toggle("on", on);
  addEventListener("dragenter", (event) => event.dataTransfer?.types.includes("Files") && veil(++inside > 0));
  addEventListener("dragleave", () => inside && veil(--inside > 0));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    veil(Boolean((inside = 0)));
    const [dropped] = event.dataTransfer.files;
    if (dropped) quietly(open(dropped));
  });
  addEventListener("paste", (event) => {
    const [pasted] = event.clipboardData.files;
    if (pasted) quietly(open(pasted));
  });
}

export function wireTheme(changed = () => {}) {
  const themes = ["", "light", "dark"];
  const names = { "": "System theme", light: "Light theme", dark: "Dark theme" };
  const show = () => {
    $("theme").textContent = names[document.documentElement.dataset.theme ?? ""];
  };
  $("theme").addEventListener("click", () => {
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme ?? "") + 1) % themes.length];
    if (next) document.documentElement.dataset.theme = next;
    else delete document.documentElement.dataset.theme;
    try {
      localStorage.setItem("vitkit-theme", next);
    } catch { /* no storage: for this visit only */ }
    show();
    changed();
  });
  show();
}
