// Talking to the server: requests with the key, and server-sent events. EventSource cannot send headers, fetch can.

const KEY = "windowpane-key";
let key = read();

function read() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

export const hasKey = () => key !== "";

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Then the key lasts as long as the page does.
  }
}

// An answer that is no success: `status`, and the server's own words.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, { headers = {}, ...options } = {}) {
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { cache: "no-store", ...options, headers: { ...headers, ...authorization } });
  if (!response.ok) throw new Refused(response.status, await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    return body.error?.message ?? body.detail ?? text;
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

// The data of each event as it comes. `heard` is called for every piece, comments that keep the line open included.
export async function* events(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const parts = (rest + value.replaceAll("\r\n", "\n")).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
