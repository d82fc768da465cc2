import { Chat } from "./chat.js";
import { ArenaMap } from "./map.js";
import { showFacts, showFigures, showGroups, showReplicas, showSequences, showTiers } from "./panels.js";
import { Requests } from "./requests.js";
import { watch } from "./stream.js";
import { Trends } from "./trends.js";
import { ask, hasKey, setKey } from "./wire.js";

const byId = (id) => document.getElementById(id);
const STATUS = { connecting: "Connecting", live: "Live", lost: "Reconnecting", key: "Key needed", paused: "Paused" };

const HISTORY_MS = 5_000;
const replica = new URLSearchParams(location.search).get("replica"); // of which alone the page shows the figures

const map = new ArenaMap();
const trends = new Trends();
const requests = new Requests(askForKey);
const chat = new Chat(askForKey);
let stream = null; // opened last, when everything it tells is there to hear it

function show(snapshot) {
  byId("model").textContent = replica ? `${snapshot.model.name}, replica ${replica}` : snapshot.model.name;
  document.title = `${snapshot.model.name} · Windowpane`;
  chat.about(snapshot.model);
  showFigures(snapshot);
  for (const id of ["map", "slab"]) byId(id).hidden = !snapshot.arena.map.length;
  map.show(snapshot.arena);
  showReplicas(snapshot.replicas);
  showGroups(snapshot.arena);
  showTiers(snapshot.tiers);
  showSequences(snapshot);
  showFacts(snapshot.model);
  requests.about(snapshot.sequences);
  readHistory(snapshot.rates.finished_requests);
}

// Read now and then, and when a request has ended. The stream says when there is somebody to ask.
let historyDue = 0;
let finished = -1;

async function readHistory(ended) {
  if (performance.now() < historyDue && (ended === finished || performance.now() < historyDue - HISTORY_MS + 500)) return;
  historyDue = performance.now() + HISTORY_MS;
  finished = ended;
  try {
    const history = await (await ask("stats/history")).json();
    trends.show(history);
    requests.list(history);
  } catch {
    // The stream tells what is wrong with the connection.
  }
}

// -- the state of the connection ---------------------------------------------------------------------------------

let state = "";
let countdown = 0;

function tell(now, detail) {
  clearInterval(countdown);
  if (now === "lost") {
    const why = `${detail.why} What you see may be out of date.`;
    if (byId("lost-why").textContent !== why) byId("lost-why").textContent = why; // read out once, not at every try
    const due = performance.now() + detail.wait;
    const say = () => {
      const seconds = Math.max(0, Math.ceil((due - performance.now()) / 1000));
      byId("lost-when").textContent = seconds ? `Trying again in ${seconds} s.` : "Trying again.";
    };
    say();
    countdown = setInterval(say, 250);
  }
  if (now === state) return;
  state = now;
  byId("lost").hidden = now !== "lost";
  byId("status").textContent = STATUS[now];
  byId("status").dataset.state = now;
  document.body.classList.toggle("stale", now === "lost" || now === "key");
  byId("key-button").hidden = now !== "key" && !hasKey();
  if (now === "key") askForKey();
}

byId("retry").addEventListener("click", () => stream.open());

// -- the key -----------------------------------------------------------------------------------------------------

function askForKey() {
  if (byId("key-dialog").open) return;
  byId("key-why").textContent = hasKey()
    ? "The server refused the key that this tab has. Give another one."
    : "It was started with --api-key. The key stays in this tab.";
  byId("key").value = "";
  byId("key-dialog").showModal();
}

byId("key-button").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key-dialog").close();
  tell("connecting"); // so that another refusal is news
  stream.open();
});

// -- the theme ---------------------------------------------------------------------------------------------------

const root = document.documentElement;
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);

function themed() {
  byId("theme").setAttribute("aria-pressed", isDark());
  map.layOut();
  trends.draw();
}

byId("theme").addEventListener("click", () => {
  const dark = !isDark();
  if (dark === systemDark.matches) delete root.dataset.theme;
  else root.dataset.theme = dark ? "dark" : "light";
  try {
    localStorage.setItem("windowpane-theme", root.dataset.theme ?? "");
  } catch {
    // Then the choice lasts as long as the page does.
  }
  themed();
});
systemDark.addEventListener("change", themed);
themed();

stream = watch(show, tell, replica);
