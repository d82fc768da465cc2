// Everything that shows a snapshot as figures and tables.

import { age, bytes, compact, count, milliseconds, percent, plural, rate } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

// Text is only touched when it changes: a page that sits still costs nothing, and selections survive.
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function showFigures({ rates, arena }) {
  const { ttft_ms: ttft, history } = rates;
  write(byId("speed"), rate(rates.output_tokens_per_s));
  write(byId("speed-note"), `${compact(rates.output_tokens)} so far`);
  bars("speed-history", history.output_tokens, "Tokens answered in each second of the last minute", rate);

  write(byId("ttft"), ttft.p50 === null ? "–" : milliseconds(ttft.p50));
  write(byId("ttft-note"), ttft.p50 === null ? "none in the last minute" : `95 % within ${milliseconds(ttft.p95)}`);
  bars("ttft-history", history.ttft_ms, "Time to first token in each second of the last minute", milliseconds);

  write(byId("hits"), rates.hit_rate === null ? "–" : percent(rates.hit_rate));
  write(byId("hits-note"), `${compact(rates.cached_tokens)} of ${compact(rates.prompt_tokens)} tokens so far`);
  bars("hits-history", history.hit_rate, "Prefix hits in each second of the last minute", percent, 1);

  write(byId("use"), percent(arena.live_bytes / Math.max(arena.total_bytes, 1)));
  const cached = arena.cached_bytes ? `${bytes(arena.cached_bytes)} cached, ` : "";
  write(byId("use-note"), `${cached}${bytes(arena.free_bytes)} free`);
  showUse(byId("use-bar"), arena);
}

// One thin bar per second; nothing where there was nothing to measure.
function bars(id, values, what, format, top = 0) {
  const svg = byId(id);
  const known = values.filter((value) => value !== null);
  const highest = Math.max(top, ...known);
  svg.setAttribute("viewBox", `0 0 ${values.length * 2} 24`);
  svg.setAttribute("preserveAspectRatio", "none");
  const path = svg.firstElementChild ?? svg.appendChild(document.createElementNS(SVG, "path"));
  let drawn = "";
  values.forEach((value, second) => {
    if (value === null || highest === 0) return;
    const height = Math.max(value > 0 || top ? 1 : 0, (24 * value) / highest);
    if (height) drawn += `M${second * 2 + 0.25} 24v${-height.toFixed(2)}h1.5v${height.toFixed(2)}z`;
  });
  path.setAttribute("d", drawn);
  const label = known.length && highest ? `${what}: at most ${format(Math.max(...known))}` : `${what}: nothing`;
  svg.setAttribute("aria-label", label);
}

function showUse(bar, arena) {
  const parts = arena.groups.flatMap((group, index) =>
    ["live", "cached", "stranded"].map((state) => [state, index, group[`${state}_bytes`]]),
  );
  while (bar.children.length < parts.length) bar.append(make("i"));
  parts.forEach(([state, index, size], i) => {
    bar.children[i].className = `shade ${state} group-${index % 8}`;
    bar.children[i].style.flexGrow = size / arena.total_bytes;
  });
  const said = ["live", "cached", "stranded", "free"].map((state) => `${bytes(arena[`${state}_bytes`])} ${state}`);
  bar.setAttribute("aria-label", said.join(", "));
}

// What is kept beside the device, where there is such a tier.
export function showTiers(tiers) {
  byId("tiers").hidden = !tiers;
  if (!tiers) return;
  const { host, disk } = tiers;
  const points = (tier) => plural(tier.restore_points, "restore point");
  const held = bytes(host.live_bytes + host.cached_bytes);
  write(byId("host-note"), `${held} of ${bytes(host.total_bytes)}, ${points(host)}`);
  showUse(byId("host-bar"), host);
  const copied = `${bytes(host.spilled_bytes)} spilled, ${bytes(host.fetched_bytes)} fetched`;
  write(byId("host-copies"), `${copied}, ${compact(host.hit_tokens)} tokens found so far`);
  byId("disk").hidden = !disk;
  if (!disk) return;
  const used = `${bytes(disk.used_bytes)} of ${bytes(disk.total_bytes)}`;
  write(byId("disk-note"), `${used}, ${points(disk)}`);
  byId("disk-bar").firstElementChild.style.flexGrow = disk.used_bytes / Math.max(disk.total_bytes, 1);
  byId("disk-bar").setAttribute("aria-label", used);
  const moved = `${bytes(disk.written_bytes)} written, ${bytes(disk.read_bytes)} read`;
  write(byId("disk-copies"), `${moved}, ${compact(disk.hit_tokens)} tokens found so far`);
}

// Engines elsewhere, where the server has none of its own. Their names lead to what each says of itself.
export function showReplicas(replicas) {
  byId("replicas").hidden = !replicas;
  if (!replicas) return;
  const rows = byId("replica-rows");
  const known = new Map([...rows.children].map((row) => [row.dataset.id, row]));
  replicas.forEach((replica) => {
    const row = known.get(replica.id) ?? rows.appendChild(replicaRow(replica.id));
    known.delete(replica.id);
    const { arena } = replica;
    const found = replica.prompt_tokens ? percent(replica.cached_tokens / replica.prompt_tokens) : "–";
    const held = [arena.live_bytes, arena.cached_bytes, arena.free_bytes].map(bytes);
    const cells = [count(replica.running), count(replica.waiting), found, ...held];
    cells.forEach((text, i) => write(row.children[i + 1], text));
  });
  known.forEach((row) => row.remove());
}

function replicaRow(id) {
  const row = make("tr");
  row.dataset.id = id;
  const head = row.appendChild(make("th"));
  head.scope = "row";
  const link = head.appendChild(make("a", "", id));
  link.href = `?replica=${encodeURIComponent(id)}`;
  ["number", "number", "number wide", "number", "number", "number wide"].forEach((name) => row.append(make("td", name)));
  return row;
}

export function showGroups(arena) {
  write(byId("arena-note"), `${bytes(arena.total_bytes)} in ${plural(arena.slabs, "slab")}`);
  const rows = byId("groups");
  while (rows.children.length > arena.groups.length) rows.lastChild.remove();
  arena.groups.forEach((group, index) => {
    const row = rows.children[index] ?? rows.appendChild(groupRow(index));
    const name = plural(group.layers, "layer");
    const held = [group.live_bytes, group.cached_bytes, group.stranded_bytes].map(bytes);
    const cells = [group.name, ...held, count(group.slabs), bytes(group.page_bytes)];
    [...row.children].forEach((cell, i) => write(cell.querySelector("span") ?? cell, cells[i]));
    row.title = group.block_tokens ? `${name}, ${plural(group.block_tokens, "token")} in a page` : name;
  });
  const totals = byId("totals");
  const row = totals.firstElementChild ?? totals.appendChild(totalRow());
  const sums = [arena.live_bytes, arena.cached_bytes, arena.stranded_bytes].map(bytes);
  const free = `${bytes(arena.free_bytes)} free`;
  [`All`, ...sums, free].forEach((text, i) => write(row.children[i], text));
}

function groupRow(index) {
  const row = make("tr", `group-${index % 8}`);
  const head = row.appendChild(make("th"));
  head.scope = "row";
  head.append(make("i", "shade live"), make("span"));
  head.firstChild.ariaHidden = "true";
  ["number", "number", "number", "number wide", "number wide"].forEach((name) => row.append(make("td", name)));
  return row;
}

function totalRow() {
  const row = make("tr");
  row.append(make("th"), make("td", "number"), make("td", "number"), make("td", "number"), make("td", "number wide"));
  row.firstChild.scope = "row";
  row.lastChild.colSpan = 2;
  return row;
}

export function showSequences({ sequences, arena }) {
  const { running, waiting, preemptions, shown } = sequences;
  const parts = [`${count(running)} running`, `${count(waiting)} waiting`];
  if (preemptions) parts.push(`${plural(preemptions, "preemption")} so far`);
  write(byId("sequences-note"), parts.join(" · "));
  byId("sequences-empty").hidden = shown.length > 0;
  const body = byId("sequences");
  const known = new Map([...body.children].map((row) => [row.dataset.id, row]));
  shown.forEach((sequence, place) => {
    const row = known.get(sequence.id) ?? sequenceRow(sequence.id, arena.groups.length);
    known.delete(sequence.id);
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
    fillSequence(row, sequence, arena.groups);
  });
  for (const row of known.values()) row.remove();
}

function sequenceRow(id, groups) {
  const row = make("tr");
  row.dataset.id = id;
  const head = row.appendChild(make("th", "request"));
  head.scope = "row";
  head.append(make("button", "link", id.replace(/^(chat)?cmpl-/, "")));
  Object.assign(head.firstChild, { type: "button", tabIndex: -1 }); // reached with the arrow keys: see requests.js
  row.dataset.request = id;
  head.title = id;
  const names = ["state", "number", "number", "pages", "number wide", "number wide"];
  row.append(...names.map((name) => make("td", name)));
  row.children[1].append(make("span", "tag"));
  row.children[3].append(make("span"), make("span", "wide"));
  for (let group = 0; group < groups; group += 1) {
    const chip = row.children[4].appendChild(make("span", `chip group-${group % 8}`));
    chip.append(make("i", "shade live"), make("b"), make("span", "hidden"));
  }
  return row;
}

function fillSequence(row, sequence, groups) {
  const [, state, prompt, answer, pages, memory, old] = row.children;
  const tag = state.firstChild;
  tag.dataset.state = sequence.state;
  write(tag, sequence.state);
  const reading = sequence.state === "prefill" && sequence.computed_tokens < sequence.prompt_tokens;
  const read = reading ? `${count(sequence.computed_tokens)} of ` : "";
  write(prompt, `${read}${count(sequence.prompt_tokens)}`);
  prompt.title = sequence.cached_tokens ? `${count(sequence.cached_tokens)} found computed` : "";
  write(answer.firstChild, count(sequence.output_tokens));
  write(answer.lastChild, ` of ${count(sequence.max_tokens)}`);
  groups.forEach((group, index) => {
    const chip = pages.children[index];
    write(chip.children[1], count(sequence.pages[index]));
    write(chip.children[2], ` of ${group.name} `);
    chip.title = `${plural(sequence.pages[index], "page")} of ${group.name}`;
  });
  write(memory, bytes(sequence.bytes));
  write(old, sequence.age_s === null ? "–" : age(sequence.age_s));
}

export function showFacts(model) {
  const context = `context ${count(model.max_model_len)}`;
  write(byId("facts-note"), [model.device, model.dtype, context].filter(Boolean).join(" · "));
  const body = byId("accounts");
  while (body.children.length < model.accounts.length) body.append(accountRow());
  model.accounts.forEach((account, i) => {
    const { name, predicted_bytes: planned, measured_bytes: measured, note } = account;
    [name, bytes(planned), bytes(measured), note].forEach((text, j) => write(body.children[i].children[j], text));
  });
}

function accountRow() {
  const row = make("tr");
  row.append(make("th"), make("td", "number"), make("td", "number"), make("td", "wide"));
  row.firstChild.scope = "row";
  return row;
}
