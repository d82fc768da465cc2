// The /stats stream: kept open while the page is looked at, opened again when it breaks.

import { Refused, ask, events } from "./wire.js";

const SILENCE_MS = 12_000; // the server says something at least every five seconds
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8_000;
const REPLICA_MS = 1_000; // a replica is asked so often

// `show(document)` gets every snapshot. `tell(state, detail)` hears of "connecting", "live", "lost" (why, and
// milliseconds until the next try), "key" (the server wants one) and "paused" (nobody looks at the page). With the id of
// a `replica`, snapshots are its own, and are asked for one by one.
export function watch(show, tell, replica = null) {
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
      for await (const data of replica ? asked(replica, mine.signal, heard) : streamed(mine.signal, heard)) {
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

  async function* streamed(signal, heard) {
    const response = await ask("stats", { headers: { Accept: "text/event-stream" }, signal });
    yield* events(response, heard);
  }

  async function* asked(id, signal, heard) {
    while (!signal.aborted) {
      const response = await ask(`replicas/${encodeURIComponent(id)}/stats`, { signal });
      yield await response.text();
      heard();
      await new Promise((resolve) => setTimeout(resolve, REPLICA_MS));
    }
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
