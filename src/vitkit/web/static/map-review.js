// Suggested fixes: accepted, rejected or open; every step can be undone, and survives closing the page.

export const ACCEPT = "accept";
export const REJECT = "reject";

export class Review {
  // issues: { columns, rows }; a row is [number of the image or -1, ...the columns of issues.csv]
  constructor(issues, key) {
    this.columns = issues.columns;
    this.issues = issues.rows.map(([row, ...cells], number) => ({ number, row, cells, ...Object.fromEntries(issues.columns.map((name, i) => [name, cells[i]])) }));
    this.key = `vitkit-review ${key}`;
    this.verdicts = new Map(); // number -> ACCEPT or REJECT
    this.steps = []; // [number, verdict before]
    try {
      const kept = JSON.parse(localStorage.getItem(this.key) ?? "[]");
      for (const [number, verdict] of kept) if (number < this.issues.length) this.verdicts.set(number, verdict);
    } catch { /* no storage: for this visit only */ }
  }

  decide(number, verdict) {
    const before = this.verdicts.get(number);
    this.steps.push([number, before]);
    this.#put(number, before === verdict ? undefined : verdict); // the same again takes it back
  }

  // The number of the fix that is as it was before, or null.
  undo() {
    if (!this.steps.length) return null;
    const [number, before] = this.steps.pop();
    this.#put(number, before);
    return number;
  }

  #put(number, verdict) {
    if (verdict) this.verdicts.set(number, verdict);
    else this.verdicts.delete(number);
    try {
      localStorage.setItem(this.key, JSON.stringify([...this.verdicts]));
    } catch { /* full, or none */ }
  }

  accepted() {
    return this.issues.filter(({ number }) => this.verdicts.get(number) === ACCEPT);
  }

  csv() {
    const cell = (value) => (/[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
    const lines = [this.columns, ...this.accepted().map(({ cells }) => cells)];
    return lines.map((cells) => `${cells.map(cell).join(",")}\r\n`).join("");
  }
}
