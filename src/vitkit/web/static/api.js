// Talking to the server: errors become sentences, a busy server is asked again.

export class Refused extends Error {}

async function answered(path, options = {}) {
  for (let attempt = 0; ; attempt++) {
    let answer;
    try {
      answer = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("The server cannot be reached. Is `vitkit serve` still running?");
    }
    if (answer.ok) return answer;
    if (answer.status === 503 && attempt < 5) {
      const seconds = Number(answer.headers.get("Retry-After")) || 1;
      await new Promise((done) => setTimeout(done, seconds * 1000 * (0.5 + Math.random())));
      continue;
    }
    if (answer.status === 401) throw new Refused("The token is missing or has changed. Load the page again.");
    const body = await answer.json().catch(() => null);
    const words = body?.error?.message ?? `the server answered ${answer.status}`;
    throw new Refused(`${words[0].toUpperCase()}${words.slice(1)}.`);
  }
}

export const file = async (name) => (await answered(`/static/${name}`)).blob();

const address = (path, fields) => `/api/v1/${path}?${new URLSearchParams(fields)}`;

export async function get(path, fields = {}, signal) {
  return (await answered(address(path, fields), { signal })).json();
}

export async function bytes(path, fields = {}, signal) {
  return (await answered(address(path, fields), { signal })).arrayBuffer();
}

export async function post(path, fields, blob, signal) {
  const options = { method: "POST", body: blob, signal, headers: { "Content-Type": "application/octet-stream" } };
  return answered(address(path, fields), options);
}

export async function explain(fields, blob, signal) {
  const answer = await post("explain", { ...fields, prepared: "true", format: "npy" }, blob, signal);
  return parseNpy(await answer.arrayBuffer());
}

// NumPy's own format: a magic word, a header in words, then the numbers (float32, row by row).
export function parseNpy(buffer) {
  const view = new DataView(buffer);
  const start = 10 + view.getUint16(8, true);
  const header = new TextDecoder("latin1").decode(new Uint8Array(buffer, 10, start - 10));
  if (!header.includes("'<f4'")) throw new Refused("The server sent numbers of an unknown kind.");
  const shape = header.match(/'shape': \(([^)]*)\)/)[1].split(",").map((n) => n.trim()).filter(Boolean).map(Number);
  return { shape, values: new Float32Array(buffer.slice(start)) };
}

export function fromDataUrl(text) {
  const bytes = Uint8Array.from(atob(text.slice(text.indexOf(",") + 1)), (c) => c.charCodeAt(0));
  return new Blob([bytes], { type: "image/png" });
}
