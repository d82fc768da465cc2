// The /stats stream: kept open while the page is looked at, opened again when it breaks.

import { Refused, ask, events } from "./wire.js";

const SILENCE_MS = 12_000; // the server says something at least every five seconds
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8_000;

// `show(document)` gets every snapshot. `tell(state, detail)` hears of "connecting", "live", "lost" (why, and
// milliseconds until the next try), "key" (the server wants one) and "paused" (nobody looks at the page).
export function watch(show, tell) {
  let attempt = null; // what is under way: an AbortController
  let timer = 0;
  let wait = FIRST_WAIT_MS;

  async function open() {
    clearTimeout(timer);
    attempt?.abort();
    const mine = (attempt = new AbortController());
    let silence = 0;
    const heard = () => {
      clearTimeout(silence);
      silence = setTimeout(() => mine.abort(), SILENCE_MS);
    };
    let why = "The server closed the stream.";
    try {
      heard();
      const response = await ask("stats", { headers: { Accept: "text/event-stream" }, signal: mine.signal });
      for await (const data of events(response, heard)) {
        if (mine !== attempt) return;
        wait = FIRST_WAIT_MS;
        tell("live");
        show(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        if (mine === attempt) tell("key");
        return;
      }
      why = error instanceof Refused ? error.message : "The server does not answer.";
    } finally {
      clearTimeout(silence);
    }
    if (mine !== attempt) return; // stopped or opened again meanwhile
    tell("lost", { why, wait });
    timer = setTimeout(open, wait);
    wait = Math.min(2 * wait, LONGEST_WAIT_MS);
  }

  function pause() {
    clearTimeout(timer);
    attempt?.abort();
    attempt = null;
    tell("paused");
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? pause() : open()));
  tell("connecting");
  if (!document.hidden) open();
  return { open };
}
