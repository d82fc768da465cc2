// Single requests: those that are over, in a list, and the life of one of them, running or not, in a dialog.

import { age, bytes, count, milliseconds, percent, plural, rate } from "./format.js";
import { make, write } from "./panels.js";
import { ask } from "./wire.js";

const byId = (id) => document.getElementById(id);
const SAID = { stop: "done", length: "cut at its limit", abort: "cancelled", error: "failed" };
const PARTS = [
  ["queued_s", "Queued"],
  ["prefilled_s", "Prefilled"],
  ["decoded_s", "Decoded"],
];

export class Requests {
  // `wantKey` is called when the server asks for a key.
  constructor(wantKey) {
    this.wantKey = wantKey;
    this.open = null; // the id of the request whose life is shown
    this.shown = new Map(); // those that run or wait, by id
    this.events = [];
    this.dialog = byId("request-dialog");
    for (const table of ["sequences", "events"]) {
      byId(table).addEventListener("click", (event) => {
        const id = event.target.closest("tr")?.dataset.request;
        if (id) this.show(id);
      });
      byId(`${table}-scroll`).addEventListener("keydown", (event) => moveFocus(event, byId(table)));
    }
    this.dialog.addEventListener("close", () => (this.open = null));
    byId("request-close").addEventListener("click", () => this.dialog.close());
    byId("request-cancel").addEventListener("click", () => this.cancel());
  }

  about(sequences) {
    this.shown = new Map(sequences.shown.map((sequence) => [sequence.id, sequence]));
    if (this.open) this.fill();
  }

  list({ events }) {
    this.events = events;
    write(byId("events-note"), events.length ? `the latest ${count(events.length)}` : "");
    byId("events-empty").hidden = events.length > 0;
    const body = byId("events");
    while (body.children.length > events.length) body.lastElementChild.remove();
    while (body.children.length < events.length) body.append(eventRow());
    events.forEach((event, i) => fillEvent(body.children[i], event));
    if (this.open) this.fill();
  }

  show(id) {
    this.open = id;
    byId("request-said").textContent = "";
    this.fill();
    if (!this.dialog.open) this.dialog.showModal();
  }

  fill() {
    const running = this.shown.get(this.open);
    const ended = this.events.find((event) => event.id === this.open && event.life);
    const life = running ?? ended?.life;
    write(byId("request-title"), this.open);
    byId("request-cancel").hidden = !running;
    if (!life) return; // it has just ended: the list will have it in a moment
    const state = running ? running.state : `${SAID[ended.what] ?? ended.what}${ended.error ? `: ${ended.error}` : ""}`;
    write(byId("request-state"), state);
    showBar(life);
    showFacts(life, running);
  }

  async cancel() {
    const said = byId("request-said");
    try {
      await ask(`requests/${encodeURIComponent(this.open)}`, { method: "DELETE" });
      said.textContent = "Cancelled.";
    } catch (error) {
      said.textContent = error.message;
      if (error.status === 401) this.wantKey();
    }
  }
}

// A list of requests is one stop for the Tab key; the arrow keys move within it.
function moveFocus(event, body) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  const buttons = [...body.querySelectorAll("button:enabled")];
  const next = buttons[Math.max(0, buttons.indexOf(document.activeElement) + step)];
  if (!next) return;
  event.preventDefault();
  next.focus();
}

function showBar(life) {
  const bar = byId("request-bar");
  while (bar.children.length < PARTS.length) bar.append(make("i", `shade live group-${bar.children.length}`));
  const whole = PARTS.reduce((sum, [name]) => sum + (life[name] ?? 0), 0) || 1;
  PARTS.forEach(([name], i) => (bar.children[i].style.flexGrow = (life[name] ?? 0) / whole));
  const said = PARTS.filter(([name]) => life[name] !== null).map(([name, word]) => `${word} ${seconds(life[name])}`);
  bar.setAttribute("aria-label", said.join(", "));
}

function showFacts(life, running) {
  const computed = life.prompt_tokens - life.cached_tokens;
  const later = life.output_tokens - 1;
  const pace = life.decoded_s && later > 0 ? `, ${rate(later / life.decoded_s)} per second` : "";
  const facts = [
    ["Queued", life.queued_s === null ? "not yet" : seconds(life.queued_s), 0],
    ["Cached", `${count(life.cached_tokens)} of ${plural(life.prompt_tokens, "prompt token")} found computed`],
    ["Prefilled", life.prefilled_s === null ? "not yet" : `${plural(computed, "token")} in ${seconds(life.prefilled_s)}`, 1],
    [
      "Decoded",
      life.decoded_s === null ? "not yet" : `${plural(life.output_tokens, "token")} in ${seconds(life.decoded_s)}${pace}`,
      2,
    ],
    ["Drafts", draftsOf(life)],
  ];
  if (life.preemptions) facts.push(["Preempted", plural(life.preemptions, "time")]);
  if (running) facts.push(["Memory", bytes(running.bytes)]);
  const list = byId("request-life");
  const wanted = facts.map(([name]) => name).join();
  if (list.dataset.facts !== wanted) {
    list.dataset.facts = wanted;
    list.replaceChildren(...facts.flatMap(([name, , group]) => [term(name, group), make("dd")]));
  }
  facts.forEach(([, text], i) => write(list.children[2 * i + 1], text));
}

function term(name, group) {
  const element = make("dt", group === undefined ? "" : `group-${group}`);
  if (group !== undefined) element.append(make("i", "shade live"));
  element.append(name);
  return element;
}

function draftsOf({ drafted_tokens: drafted, accepted_tokens: accepted }) {
  if (!drafted) return "none";
  return `${count(accepted)} of ${count(drafted)} accepted (${percent(accepted / drafted)})`;
}

const seconds = (value) => milliseconds(1000 * value);

function eventRow() {
  const row = make("tr");
  const head = row.appendChild(make("th", "request"));
  head.scope = "row";
  head.append(make("button", "link"));
  Object.assign(head.firstChild, { type: "button", tabIndex: -1 });
  row.append(...["", "number", "number", "number wide", "number"].map((name) => make("td", name)));
  row.children[1].append(make("span", "tag"));
  return row;
}

function fillEvent(row, event) {
  const { life } = event;
  const [head, what, prompt, answer, took, when] = row.children;
  const button = head.firstChild;
  if (life) row.dataset.request = event.id;
  else delete row.dataset.request;
  button.disabled = !life;
  write(button, event.id.replace(/^(chat)?cmpl-/, ""));
  head.title = event.id;
  what.firstChild.dataset.state = event.what;
  what.title = event.error ?? "";
  write(what.firstChild, `${SAID[event.what] ?? event.what}${event.error ? ` ${event.error}` : ""}`);
  write(prompt, life ? count(life.prompt_tokens) : "");
  write(answer, life ? count(life.output_tokens) : "");
  const all = life ? (life.queued_s ?? 0) + (life.prefilled_s ?? 0) + (life.decoded_s ?? 0) : null;
  write(took, all === null ? "" : seconds(all));
  write(when, `${age(Math.max(0, Date.now() / 1000 - event.at))} ago`);
}
