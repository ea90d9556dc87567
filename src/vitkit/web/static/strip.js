// A row of small maps to choose from: layers, or heads. A radio group for keyboard and screen reader.

import { paint, range } from "./colours.js";
import { el, movedBy } from "./dom.js";

export class Strip {
  constructor(parent, pick) {
    this.parent = parent;
    this.pick = pick;
    this.buttons = [];
    parent.addEventListener("keydown", (event) => {
      const index = movedBy(event.key, Math.max(0, this.selected), this.buttons.length);
      if (index === null) return;
      event.preventDefault();
      pick(index);
      this.buttons[index].focus();
    });
  }

  // `labels` are short words, `names` what is read aloud, `maps` N values each; null is on its way, and drawn as nothing.
  show(labels, names, maps, h, w, selected) {
    if (JSON.stringify(this.names) !== JSON.stringify(names)) this.#build(labels, names);
    this.selected = selected;
    this.parent.setAttribute("aria-busy", String(maps.some((map) => !map)));
    this.buttons.forEach((button, i) => {
      button.setAttribute("aria-checked", String(i === selected));
      button.tabIndex = i === Math.max(0, selected) ? 0 : -1;
      if (maps[i]) paint(button.firstChild, maps[i], h, w, ...range(maps[i]));
      else button.firstChild.width = button.firstChild.height = 1; // never what was there before: it is of another question
    });
  }

  #build(labels, names) {
    this.names = names;
    this.buttons = names.map((name, i) =>
      el("button", { role: "radio", type: "button", "aria-label": name, title: name, onclick: () => this.pick(i) },
        el("canvas", { width: 1, height: 1, "aria-hidden": "true" }), labels[i]));
    this.parent.replaceChildren(...this.buttons);
  }

  reveal() {
    const button = this.buttons[this.selected];
    if (!button) return;
    const [left, right] = [button.offsetLeft - this.parent.offsetLeft, this.parent.clientWidth];
    if (left < this.parent.scrollLeft || left + button.offsetWidth > this.parent.scrollLeft + right) {
      this.parent.scrollLeft = left - right / 2;
    }
  }
}
