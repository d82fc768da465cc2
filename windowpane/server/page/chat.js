// The box that tries the model: a conversation, or the continuation of a text where the model has no chat template.

import { count, milliseconds, plural, rate } from "./format.js";
import { Refused, ask, events } from "./wire.js";

const byId = (id) => document.getElementById(id);
const NEAR_END_PX = 40;

export class Chat {
  // `wantKey` is called when the server asks for a key.
  constructor(wantKey) {
    this.wantKey = wantKey;
    this.model = null;
    this.messages = [];
    this.running = null; // an AbortController while an answer comes
    [this.log, this.prompt, this.send, this.clear] = ["log", "prompt", "send", "clear"].map(byId);
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
    this.clear.addEventListener("click", () => this.forget());
  }

  about(model) {
    if (this.model?.name === model.name && this.model.has_chat_template === model.has_chat_template) return;
    this.model = model;
    const chats = model.has_chat_template;
    const mode = byId("mode");
    mode.hidden = chats;
    mode.textContent = chats ? "" : "This model has no chat template: the box continues your text instead of chatting.";
    byId("prompt-label").textContent = chats ? "Message" : "Text to continue";
    this.prompt.placeholder = chats ? "Ask something" : "Begin a text";
  }

  forget() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.clear.disabled = true;
    this.prompt.focus();
  }

  async submit() {
    const text = this.prompt.value;
    if (!text.trim() || !this.model) return;
    this.prompt.value = "";
    this.clear.disabled = false;
    const chats = this.model.has_chat_template;
    const answer = chats ? this.beginTurn(text) : this.beginText(text);
    const mine = (this.running = new AbortController());
    this.send.textContent = "Stop";
    const measured = { began: performance.now(), first: null, usage: null, finish: null };
    try {
      await this.stream(this.request(text, chats), answer, measured, mine.signal);
      this.note(answer, summary(measured));
    } catch (error) {
      this.failed(error, mine.signal.aborted, answer, text);
    } finally {
      answer.block.removeAttribute("aria-busy");
      if (chats && this.messages.length) this.remember(answer.text);
      if (this.running === mine) this.running = null;
      if (!this.running) this.send.textContent = "Send";
    }
  }

  // Turns alternate: a question that was not answered at all is as if it had not been asked.
  remember(text) {
    if (text) this.messages.push({ role: "assistant", content: text });
    else this.messages.pop();
  }

  request(text, chats) {
    const body = {
      model: this.model.name,
      temperature: Number(byId("temperature").value),
      max_tokens: Math.max(1, Math.floor(Number(byId("max-tokens").value)) || 1),
      stream: true,
      stream_options: { include_usage: true },
    };
    if (!chats) return ["v1/completions", { ...body, prompt: text }];
    this.messages.push({ role: "user", content: text });
    return ["v1/chat/completions", { ...body, messages: this.messages }];
  }

  async stream([path, body], answer, measured, signal) {
    const headers = { "Content-Type": "application/json" };
    const response = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refused(500, chunk.error.message);
      measured.usage = chunk.usage ?? measured.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      measured.finish = choice.finish_reason ?? measured.finish;
      const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
      const piece = choice.delta?.content ?? choice.text ?? "";
      if (!thought && !piece) continue;
      measured.first ??= performance.now();
      measured.last = performance.now();
      this.keepInSight(() => {
        if (thought) answer.think(thought);
        if (piece) answer.add(piece);
      });
    }
    throw new Error("the stream ended early");
  }

  beginTurn(text) {
    this.block("you", "You").append(text);
    return this.answerBlock(this.block("model", this.model.name));
  }

  beginText(text) {
    const block = this.block("model", "Text");
    const begun = document.createElement("span");
    begun.className = "begun";
    begun.textContent = text;
    block.append(begun);
    return this.answerBlock(block);
  }

  answerBlock(block) {
    block.setAttribute("aria-busy", "true"); // read out once, when it is whole
    const written = document.createElement("span");
    block.append(written);
    return {
      block,
      text: "",
      add(piece) {
        this.text += piece;
        written.append(piece);
      },
      think(piece) {
        this.thoughts ??= thoughtsBefore(written);
        this.thoughts.append(piece);
      },
    };
  }

  block(who, name) {
    const block = document.createElement("div");
    block.className = `turn ${who}`;
    const label = document.createElement("p");
    label.className = "who";
    label.textContent = name;
    block.append(label);
    this.keepInSight(() => this.log.append(block), true);
    return block;
  }

  note(answer, text, role = null) {
    const line = document.createElement("p");
    line.className = role ? "said error" : "said";
    if (role) line.setAttribute("role", role);
    line.textContent = text;
    this.keepInSight(() => answer.block.append(line));
  }

  failed(error, stopped, answer, text) {
    if (stopped) {
      this.note(answer, "Stopped.");
      return;
    }
    if (!answer.text && !this.prompt.value) this.prompt.value = text; // nothing typed is lost
    const refused = error instanceof Refused;
    this.note(answer, refused ? error.message : "The connection broke before the answer was whole.", "alert");
    if (refused && error.status === 401) this.wantKey();
  }

  // New text scrolls into sight, unless the reader has scrolled up.
  keepInSight(change, always = false) {
    const { log } = this;
    const near = always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    change();
    if (near) log.scrollTop = log.scrollHeight;
  }
}

function thoughtsBefore(written) {
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = "Reasoning";
  details.append(summary);
  written.before(details);
  return details;
}

function summary({ began, first, last, usage, finish }) {
  const parts = [];
  const tokens = usage?.completion_tokens;
  if (tokens !== undefined) parts.push(plural(tokens, "token"));
  if (first !== null) {
    if (tokens > 1 && last > first) parts.push(`${rate((1000 * (tokens - 1)) / (last - first))} per second`);
    parts.push(`first after ${milliseconds(first - began)}`);
  }
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${count(cached)} of ${plural(usage.prompt_tokens, "prompt token")} found computed`);
  if (finish === "length") parts.push("cut at its limit");
  return parts.join(" · ") || "An empty answer.";
}
