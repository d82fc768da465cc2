// The last 15 minutes as charts with axes: buckets from the server, drawn in pixels so that text keeps its shape.

import { bytes, milliseconds, rate } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT_PX = 132;
const MARGIN = { left: 68, right: 10, top: 8, bottom: 22 };
const MINUTES = [15, 10, 5, 0];
const NARROW_PX = 300; // then only the ends of the axis are named

export class Trends {
  constructor() {
    this.history = null;
    new ResizeObserver(() => this.draw()).observe(document.querySelector(".charts"));
  }

  show(history) {
    this.history = history;
    this.draw();
  }

  draw() {
    if (!this.history) return;
    const { trends, groups, total_bytes: total } = this.history;
    line("speed-trend", "Tokens per second", trends.output_tokens_per_s, rate);
    line("ttft-trend", "Time to first token", trends.ttft_ms, milliseconds);
    stack("memory-trend", trends.held_bytes, groups, total);
  }
}

// A line through all buckets that have a value. Where one has none, time to first token was not measured: a gap.
function line(id, what, values, format) {
  const known = values.filter((value) => value !== null);
  const top = niceTop(Math.max(0, ...known));
  const plot = begin(id, top, format);
  let path = "";
  let inside = false;
  values.forEach((value, i) => {
    if (value === null) {
      inside = false;
      return;
    }
    path += `${inside ? "L" : "M"}${plot.x(i, values.length)} ${plot.y(value)}`;
    if (!inside) path += "h0.01"; // a value alone is a dot
    inside = true;
  });
  plot.add("path", { class: "trend", d: path });
  plot.name(known.length ? `${what}, last 15 minutes: at most ${format(Math.max(...known))}` : `${what}: nothing yet`);
}

function stack(id, held, groups, total) {
  const plot = begin(id, total, (size) => bytes(size).replace(".00 ", " "));
  const count = held[0]?.length ?? 0;
  let below = Array(count).fill(0);
  held.forEach((values, group) => {
    const above = values.map((value, i) => below[i] + value);
    const up = above.map((value, i) => `${plot.x(i, count)} ${plot.y(value)}`);
    const down = below.map((value, i) => `${plot.x(i, count)} ${plot.y(value)}`).reverse();
    plot.add("path", { class: `area group-${group % 8}`, d: `M${[...up, ...down].join("L")}z` });
    below = above;
  });
  const last = held.map((values, i) => `${groups[i]} ${bytes(values.at(-1) ?? 0)}`);
  plot.name(`Memory, last 15 minutes. Now ${last.join(", ")} of ${bytes(total)}`);
}

function begin(id, top, format) {
  const svg = document.getElementById(id);
  const width = Math.max(160, svg.parentElement.clientWidth);
  svg.replaceChildren();
  svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT_PX}`);
  const right = width - MARGIN.right;
  const bottom = HEIGHT_PX - MARGIN.bottom;
  const add = (tag, attributes, text = "") => {
    const element = svg.appendChild(document.createElementNS(SVG, tag));
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text) element.textContent = text;
    return element;
  };
  const x = (i, count) => (MARGIN.left + ((right - MARGIN.left) * i) / Math.max(1, count - 1)).toFixed(1);
  const y = (value) => (bottom - ((bottom - MARGIN.top) * value) / (top || 1)).toFixed(1);
  for (const value of top ? [0, top / 2, top] : [0]) {
    add("line", { class: value ? "grid" : "axis", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) });
    add("text", { x: MARGIN.left - 8, y: Number(y(value)) + 4, "text-anchor": "end" }, value ? format(value) : "0");
  }
  MINUTES.filter((minutes) => width > NARROW_PX || minutes % 15 === 0).forEach((minutes) => {
    const anchor = minutes === 15 ? "start" : minutes === 0 ? "end" : "middle";
    const label = minutes === 0 ? "now" : `−${minutes} min`;
    const at = MARGIN.left + ((right - MARGIN.left) * (15 - minutes)) / 15;
    add("text", { x: at, y: HEIGHT_PX - 6, "text-anchor": anchor }, label);
  });
  return { add, x, y, name: (text) => svg.setAttribute("aria-label", text) };
}

// 1, 2 or 5 times a power of ten, so that the axis has round numbers.
function niceTop(value) {
  if (value <= 0) return 0;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
