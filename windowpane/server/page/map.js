// The arena as a map: one cell per slab, in the order of memory. A cell fills from below with live pages, then cached
// ones, then what lies stranded; its colour is its group's.

import { bytes, count, plural } from "./format.js";

const TALLEST_PX = 300;
const SMALLEST_CELL_PX = 3;
const LARGEST_CELL_PX = 26;
const EASE_MS = 200;

export class ArenaMap {
  constructor() {
    this.frame = document.getElementById("map");
    this.canvas = document.getElementById("map-canvas");
    this.cursor = document.getElementById("map-cursor");
    this.detail = document.getElementById("slab");
    this.context = this.canvas.getContext("2d");
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.touched = matchMedia("(pointer: coarse), (max-width: 720px)"); // no keyboard to speak of
    this.touched.addEventListener("change", () => this.describe());
    this.arena = null;
    this.shown = []; // what is drawn: {group, parts: [live, cached, stranded]} as shares of the cell
    this.target = [];
    this.selected = -1;
    this.reached = 0; // where the keyboard was last
    this.columns = 1;
    this.pitch = LARGEST_CELL_PX;
    new ResizeObserver(() => this.layOut()).observe(this.frame);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.leave());
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("focus", () => this.selected < 0 && this.select(this.reached));
    this.canvas.addEventListener("blur", () => this.select(-1));
  }

  show(arena) {
    const before = this.arena;
    this.arena = arena;
    const whole = arena.slab_bytes * arena.slabs_per_cell;
    this.target = arena.map.flatMap(([cells, group, ...parts]) => {
      const cell = { group, parts: parts.map((part) => part / whole), bytes: parts };
      return Array(cells).fill(cell);
    });
    if (before?.slabs !== arena.slabs || before?.groups.length !== arena.groups.length) {
      this.shown = this.target.slice();
      this.layOut();
      this.canvas.setAttribute("aria-valuemax", this.target.length);
      this.say();
    } else {
      this.ease();
    }
    this.describe();
  }

  // Colours come from the style sheet, where both themes are.
  readColours() {
    const of = (element) => getComputedStyle(element).backgroundColor;
    const swatch = document.createElement("i");
    this.frame.append(swatch);
    this.colours = this.arena.groups.map((_, index) =>
      ["live", "cached", "stranded"].map((state) => {
        swatch.className = `shade ${state} group-${index % 8}`;
        return of(swatch);
      }),
    );
    swatch.className = "shade free";
    this.free = of(swatch);
    swatch.remove();
  }

  layOut() {
    if (!this.arena) return;
    this.readColours();
    const cells = this.target.length;
    const width = this.frame.clientWidth;
    const ideal = Math.floor(Math.sqrt((width * TALLEST_PX) / Math.max(cells, 1)));
    const pitch = Math.min(Math.max(ideal, SMALLEST_CELL_PX), LARGEST_CELL_PX);
    this.columns = Math.max(1, Math.floor(width / pitch));
    this.pitch = width / this.columns;
    const rows = Math.ceil(cells / this.columns);
    const scale = devicePixelRatio || 1;
    const height = Math.ceil(rows * this.pitch);
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.scale = scale;
    for (let cell = 0; cell < cells; cell += 1) this.draw(cell);
    this.placeCursor();
  }

  // Where a cell lies, in device pixels, so that gaps are even.
  box(cell) {
    const step = this.pitch * this.scale;
    const column = cell % this.columns;
    const row = Math.floor(cell / this.columns);
    const gap = Math.max(1, Math.round((this.pitch >= 12 ? 2 : 1) * this.scale));
    const left = Math.round(column * step);
    const top = Math.round(row * step);
    return [left, top, Math.round((column + 1) * step) - left - gap, Math.round((row + 1) * step) - top - gap];
  }

  draw(cell) {
    const { group, parts } = this.shown[cell];
    const [left, top, width, height] = this.box(cell);
    const { context } = this;
    context.fillStyle = this.free;
    context.fillRect(left, top, width, height);
    if (group < 0) return;
    let below = 0;
    parts.forEach((part, state) => {
      if (part <= 0) return;
      const from = Math.round(height * (1 - below));
      below += part;
      const to = Math.round(height * (1 - Math.min(below, 1)));
      context.fillStyle = this.colours[group][state];
      context.fillRect(left, top + to, width, from - to);
    });
  }

  // Cells that changed move to where they are now; the others are left alone.
  ease() {
    const changed = [];
    this.target.forEach((cell, index) => {
      const old = this.shown[index];
      if (old.group !== cell.group || cell.parts.some((part, i) => part !== old.parts[i])) changed.push(index);
    });
    cancelAnimationFrame(this.animation);
    if (this.calm.matches) {
      changed.forEach((index) => this.settle(index));
      return;
    }
    const from = new Map(changed.map((index) => [index, this.start(index)]));
    const began = performance.now();
    const step = (now) => {
      const progress = Math.min(1, (now - began) / EASE_MS);
      for (const [index, parts] of from) {
        if (progress === 1) this.settle(index);
        else {
          const { group, parts: goal } = this.target[index];
          const share = progress * (2 - progress);
          this.shown[index] = { group, parts: goal.map((part, i) => parts[i] + share * (part - parts[i])) };
          this.draw(index);
        }
      }
      if (progress < 1) this.animation = requestAnimationFrame(step);
    };
    this.animation = requestAnimationFrame(step);
  }

  // A cell that changes hands starts empty.
  start(index) {
    const { group, parts } = this.shown[index];
    return group === this.target[index].group ? parts : [0, 0, 0];
  }

  settle(index) {
    this.shown[index] = this.target[index];
    this.draw(index);
  }

  point(event) {
    const column = Math.min(this.columns - 1, Math.floor(event.offsetX / this.pitch));
    const cell = Math.floor(event.offsetY / this.pitch) * this.columns + column;
    this.select(cell >= 0 && cell < this.target.length ? cell : -1);
  }

  leave() {
    if (document.activeElement !== this.canvas) this.select(-1);
  }

  move(event) {
    const last = this.target.length - 1;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const here = Math.max(this.selected, 0);
    const to = { Home: 0, End: last, PageUp: here - 5 * this.columns, PageDown: here + 5 * this.columns }[event.key];
    const next = to ?? (event.key in steps ? here + steps[event.key] : null);
    if (next === null) return;
    event.preventDefault();
    this.reached = Math.min(last, Math.max(0, next));
    this.select(this.reached);
  }

  select(cell) {
    this.selected = cell;
    this.placeCursor();
    this.describe();
    if (this.arena) this.say();
  }

  placeCursor() {
    const visible = this.selected >= 0 && this.selected < this.target.length;
    this.cursor.hidden = !visible;
    if (!visible) return;
    const [left, top, width, height] = this.box(this.selected).map((pixels) => pixels / this.scale);
    Object.assign(this.cursor.style, {
      transform: `translate(${left}px, ${top}px)`,
      width: `${width}px`,
      height: `${height}px`,
    });
  }

  describe() {
    const cell = this.target[this.selected];
    this.detail.textContent = cell ? this.sentence(this.selected, cell) : this.invitation();
    this.detail.classList.toggle("unset", !cell);
  }

  invitation() {
    return this.touched.matches
      ? "Tap a slab to see what it holds."
      : "Point at a slab, or move with the arrow keys.";
  }

  // For screen readers: only when someone moves, so that numbers which change by themselves are not read out.
  say() {
    const cell = this.target[this.selected];
    this.canvas.setAttribute("aria-valuenow", Math.max(this.selected, 0) + 1);
    const text = cell ? this.sentence(this.selected, cell) : plural(this.arena.slabs, "slab");
    this.canvas.setAttribute("aria-valuetext", text);
  }

  sentence(index, cell) {
    const { slabs_per_cell: together, slabs, groups, slab_bytes } = this.arena;
    const first = index * together + 1;
    const last = Math.min(first + together - 1, slabs);
    const name = together === 1 ? `Slab ${count(first)} of ${count(slabs)}` : `Slabs ${count(first)}–${count(last)}`;
    const [live, cached, stranded] = cell.bytes;
    if (cell.group < 0) return `${name}: free, ${bytes((last - first + 1) * slab_bytes)}`;
    const group = groups[cell.group];
    if (together > 1) {
      return `${name}: mostly ${group.name}, ${bytes(live)} live, ${bytes(cached)} cached, ${bytes(stranded)} stranded`;
    }
    const pages = (size) => size / group.page_bytes;
    const parts = [`${count(pages(live))} of ${plural(group.pages_per_slab, "page")} live`];
    if (cached) parts.push(`${count(pages(cached))} cached`);
    if (stranded) parts.push(`${bytes(stranded)} stranded`);
    return `${name}: ${group.name}, ${parts.join(", ")}`;
  }
}
