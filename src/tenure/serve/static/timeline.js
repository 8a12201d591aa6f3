// The session's memory over its logical tokens, drawn on a canvas: blocks, marks, rotary positions, layers.

import {REGIONS, color, compact, count, plural, regionName, shown} from "./dom.js";

const BLOCKS = 112;
const MARKS = 16;
const PLACES = 74;
const AXIS = 20;
const GAP = 14;
const LABEL = 14;

export class Timeline {
  /**
   * @param parts the canvas, the overview's canvas and the tip.
   * @param on select(block or null), window(start, stop or null): what the user asked for.
   */
  constructor({canvas, overview, tip}, on) {
    this.canvas = canvas;
    this.small = overview;
    this.tip = tip;
    this.on = on;
    this.view = null;
    this.whole = null;
    this.picked = null;
    this.over = null;
    this.region = null;
    this.pointers = new Map();
    this.palette = {};
    this.repaint();
    new ResizeObserver(() => this.draw()).observe(canvas);
    this.listen();
  }

  /** Read the colours again, after the theme has changed. */
  repaint() {
    const style = getComputedStyle(document.documentElement);
    for (const name of [...REGIONS, "ink", "soft", "line", "accent", "card", "sunk"]) {
      this.palette[name] = style.getPropertyValue(`--${name}`).trim();
    }
    if (this.view) this.draw();
  }

  /** Show a memory view; `whole` is one of the whole session, for the overview. */
  show(view, whole) {
    this.view = view;
    this.whole = whole;
    if (this.picked) this.picked = this.find(this.picked);
    this.draw();
  }

  find(block) {
    const same = this.view.blocks.find((one) => (block.id ? one.id === block.id : one.start === block.start));
    return same ?? block;
  }

  pick(block, {reveal = false} = {}) {
    this.picked = block;
    if (block && reveal && (block.stop <= this.start || block.start >= this.stop)) {
      const half = (this.stop - this.start) / 2;
      this.move(block.start - half, block.start + half);
    }
    this.draw();
  }

  get start() {
    return this.view ? this.view.window[0] : 0;
  }

  get stop() {
    return this.view ? Math.max(this.view.window[1], this.view.window[0] + 1) : 1;
  }

  get layered() {
    return Boolean(this.view?.blocks.some((block) => block.by_layer));
  }

  get height() {
    const layers = this.layered ? Math.min(90, Math.max(30, this.view.groups * 4)) : 0;
    return LABEL + BLOCKS + MARKS + GAP + LABEL + PLACES + (layers ? GAP + LABEL + layers : 0) + AXIS;
  }

  x(token) {
    return ((token - this.start) / (this.stop - this.start)) * this.wide;
  }

  draw() {
    if (!this.view) return;
    const paint = this.begin(this.canvas, this.height);
    if (!paint) return;
    const {ink, soft, line, accent, card} = this.palette;
    const faded = (block) => this.region !== null && !this.has(block, this.region);
    paint.font = "11.5px system-ui, 'DejaVu Sans', sans-serif";
    paint.textBaseline = "alphabetic";

    let top = LABEL;
    this.label(paint, "resident share", top - 4);
    for (const block of this.view.blocks) {
      const [left, wide] = this.extent(block);
      const tint = this.palette[REGIONS.includes(block.region) ? block.region : "other"];
      paint.fillStyle = tint;
      paint.globalAlpha = faded(block) ? 0.05 : 0.17;
      paint.fillRect(left, top, wide, BLOCKS);
      if (block.retrievable) {
        paint.globalAlpha = faded(block) ? 0.04 : 0.24;
        const tall = (BLOCKS * Math.min(100 - block.resident, block.retrievable)) / 100;
        for (let y = top + BLOCKS - (BLOCKS * block.resident) / 100 - 3; y > top + BLOCKS - (BLOCKS * block.resident) / 100 - tall; y -= 6) {
          paint.fillRect(left, y, wide, 1.5);
        }
      }
      const stood = block.evicted.compressed ?? 0;
      if (block.compressed && stood) {
        const tall = (BLOCKS * Math.min(stood / (block.stop - block.start), 1 - block.resident / 100));
        paint.globalAlpha = faded(block) ? 0.1 : 0.5;
        paint.fillRect(left, top + BLOCKS - (BLOCKS * block.resident) / 100 - tall, wide, tall);
      }
      if (block.resident) {
        const tall = Math.max(2, (BLOCKS * block.resident) / 100);
        paint.globalAlpha = faded(block) ? 0.16 : 1;
        paint.fillRect(left, top + BLOCKS - tall, wide, tall);
      }
    }
    paint.globalAlpha = 1;
    paint.fillStyle = line;
    paint.fillRect(0, top + BLOCKS, this.wide, 1);

    top += BLOCKS + 4;
    for (const block of this.view.blocks) {
      const [left, wide] = this.extent(block);
      if (block.next !== null && block.next !== undefined) {
        paint.fillStyle = accent;
        paint.globalAlpha = block.next === 0 ? 1 : Math.max(0.35, 0.85 - 0.1 * block.next);
        paint.fillRect(left, top, Math.max(2, wide), 4);
      }
      if (block.pin || block.pins) {
        paint.fillStyle = ink;
        paint.globalAlpha = block.pin === "soft" ? 0.45 : 1;
        paint.fillRect(left, top + 6, Math.max(2, wide), 3);
      }
    }
    paint.globalAlpha = 1;

    top += MARKS - 4 + GAP + LABEL;
    const limit = this.view.limit ?? Math.max(1, this.view.next_position);
    this.label(paint, `rotary position, 0 to ${compact(limit)}`, top - 4);
    paint.fillStyle = this.palette.sunk;
    paint.fillRect(0, top, this.wide, PLACES);
    const height = (position) => top + PLACES - (PLACES * position) / limit;
    for (const block of this.view.blocks) {
      if (!block.positions) continue;
      const [left, wide] = this.extent(block);
      const [low, high] = block.positions;
      paint.globalAlpha = faded(block) ? 0.15 : 1;
      paint.fillStyle = this.palette[REGIONS.includes(block.region) ? block.region : "other"];
      paint.fillRect(left, height(high) - 1, wide, Math.max(2, height(low) - height(high) + 1));
    }
    paint.globalAlpha = 1;
    paint.strokeStyle = accent;
    paint.setLineDash([4, 4]);
    paint.beginPath();
    paint.moveTo(0, height(this.view.next_position) + 0.5);
    paint.lineTo(this.wide, height(this.view.next_position) + 0.5);
    paint.stroke();
    paint.setLineDash([]);
    top += PLACES;

    if (this.layered) {
      const layers = Math.min(90, Math.max(30, this.view.groups * 4));
      top += GAP + LABEL;
      this.label(paint, `resident share of each of ${this.view.groups} layers, the first on top`, top - 4);
      const row = layers / this.view.groups;
      for (const block of this.view.blocks) {
        const [left, wide] = this.extent(block);
        paint.fillStyle = this.palette[REGIONS.includes(block.region) ? block.region : "other"];
        (block.by_layer ?? []).forEach((share, layer) => {
          paint.globalAlpha = (0.06 + (0.94 * share) / 100) * (faded(block) ? 0.15 : 1);
          paint.fillRect(left, top + layer * row, wide, row > 3 ? row - 1 : row);
        });
      }
      paint.globalAlpha = 1;
      top += layers;
    }
    this.axis(paint, top);

    for (const [block, width] of [[this.over, 1], [this.picked, 2]]) {
      if (!block || block.stop <= this.start || block.start >= this.stop) continue;
      const [left, wide] = this.extent(block);
      paint.strokeStyle = ink;
      paint.lineWidth = width + 2;
      paint.strokeStyle = card;
      paint.strokeRect(left - 1, LABEL - 1, Math.max(3, wide) + 2, BLOCKS + 2);
      paint.lineWidth = width;
      paint.strokeStyle = ink;
      paint.strokeRect(left - 1, LABEL - 1, Math.max(3, wide) + 2, BLOCKS + 2);
      paint.fillStyle = soft;
    }
    this.describe();
    this.drawOverview();
  }

  begin(canvas, height) {
    const wide = canvas.clientWidth;
    if (!wide) return null;
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(wide * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(wide * scale);
      canvas.height = Math.round(height * scale);
    }
    const paint = canvas.getContext("2d");
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.clearRect(0, 0, wide, height);
    if (canvas === this.canvas) this.wide = wide;
    return paint;
  }

  extent(block) {
    const left = this.x(Math.max(block.start, this.start));
    const right = this.x(Math.min(block.stop, this.stop));
    const wide = right - left;
    return [left, Math.max(0.75, wide > 4 ? wide - 1 : wide)];
  }

  has(block, region) {
    return block.regions ? region in block.regions : block.region === region;
  }

  label(paint, text, y) {
    paint.fillStyle = this.palette.soft;
    paint.textAlign = "left";
    paint.fillText(text, 0, y);
  }

  axis(paint, top) {
    const length = this.stop - this.start;
    const rough = length / Math.max(2, Math.floor(this.wide / 110));
    const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
    const step = Math.max(1, [1, 2, 5, 10].map((unit) => unit * power).find((unit) => unit >= rough));
    paint.fillStyle = this.palette.soft;
    for (let token = Math.ceil(this.start / step) * step; token <= this.stop; token += step) {
      const x = this.x(token);
      if (x > this.wide - 1) break;
      paint.fillRect(Math.round(x), top, 1, 4);
      paint.textAlign = x < 20 ? "left" : x > this.wide - 34 ? "right" : "center";
      paint.fillText(count(token), x < 20 ? Math.max(0, x) : x, top + 15);
    }
  }

  drawOverview() {
    const zoomed = this.zoomed;
    this.small.hidden = !zoomed;
    if (!zoomed || !this.whole) return;
    const paint = this.begin(this.small, 34);
    if (!paint) return;
    const wide = this.small.clientWidth;
    const scale = wide / Math.max(1, this.whole.tokens);
    for (const block of this.whole.blocks) {
      const left = block.start * scale;
      const size = Math.max(0.75, (block.stop - block.start) * scale);
      paint.fillStyle = this.palette[REGIONS.includes(block.region) ? block.region : "other"];
      paint.globalAlpha = 0.2;
      paint.fillRect(left, 4, size, 26);
      paint.globalAlpha = 1;
      if (block.resident) {
        const tall = Math.max(1, (26 * block.resident) / 100);
        paint.fillRect(left, 30 - tall, size, tall);
      }
    }
    const left = this.start * scale;
    const size = Math.max(3, (this.stop - this.start) * scale);
    paint.globalAlpha = 0.6;
    paint.fillStyle = this.palette.card;
    paint.fillRect(0, 0, left, 34);
    paint.fillRect(left + size, 0, wide - left - size, 34);
    paint.globalAlpha = 1;
    paint.strokeStyle = this.palette.ink;
    paint.lineWidth = 1.5;
    paint.strokeRect(left + 0.75, 0.75, Math.min(size, wide - left) - 1.5, 32.5);
  }

  get zoomed() {
    return Boolean(this.view) && (this.start > 0 || this.view.window[1] < this.view.tokens);
  }

  /** What a screen reader says of the block that is picked. */
  describe() {
    const blocks = this.view.blocks;
    const place = this.picked ? blocks.indexOf(this.picked) : -1;
    this.canvas.setAttribute("aria-valuemin", "0");
    this.canvas.setAttribute("aria-valuemax", String(blocks.length));
    this.canvas.setAttribute("aria-valuenow", String(place + 1));
    this.canvas.setAttribute(
      "aria-valuetext",
      place < 0 ? `${plural(this.view.spans, "span")}, none picked` : lines(blocks[place]).join(", "),
    );
  }

  // -- moving about ----------------------------------------------------------------------------

  move(start, stop) {
    const most = this.view.tokens;
    let size = Math.min(most, Math.max(16, stop - start));
    let from = Math.max(0, Math.min(start, most - size));
    from = Math.round(from);
    size = Math.round(size);
    if (size >= most) this.on.window(null);
    else this.on.window([from, from + size]);
  }

  zoom(factor, at = this.picked ? (this.picked.start + this.picked.stop) / 2 : (this.start + this.stop) / 2) {
    const share = Math.min(1, Math.max(0, (at - this.start) / (this.stop - this.start)));
    const size = (this.stop - this.start) * factor;
    this.move(at - size * share, at + size * (1 - share));
  }

  at(x) {
    const token = this.start + (x / this.wide) * (this.stop - this.start);
    return this.view?.blocks.find((block) => block.start <= token && token < block.stop) ?? null;
  }

  listen() {
    const {canvas} = this;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, (event) => this.up(event, name === "pointerup"));
    }
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("blur", () => this.hover(null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("dblclick", (event) => {
      const block = this.at(event.offsetX);
      if (block) this.move(block.start - (block.stop - block.start) / 4, block.stop + (block.stop - block.start) / 4);
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!this.view || !(event.ctrlKey || event.metaKey)) return;
        event.preventDefault();
        this.zoom(Math.exp(event.deltaY / 300), this.start + (event.offsetX / this.wide) * (this.stop - this.start));
      },
      {passive: false},
    );
    const scrub = (event) => {
      if (!this.whole || !event.buttons) return;
      const middle = (event.offsetX / this.small.clientWidth) * this.whole.tokens;
      const half = (this.stop - this.start) / 2;
      this.move(middle - half, middle + half);
    };
    this.small.addEventListener("pointerdown", (event) => {
      this.small.setPointerCapture(event.pointerId);
      scrub(event);
    });
    this.small.addEventListener("pointermove", scrub);
  }

  down(event) {
    if (!this.view) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, event.offsetX);
    this.grip = {x: event.offsetX, moved: false, window: [this.start, this.stop], spread: this.spread()};
  }

  spread() {
    const [one, two] = [...this.pointers.values()];
    return two === undefined ? null : Math.max(20, Math.abs(one - two));
  }

  moved(event) {
    if (!this.view) return;
    if (!this.pointers.has(event.pointerId)) {
      this.hover(this.at(event.offsetX), event.offsetX, event.offsetY);
      return;
    }
    this.pointers.set(event.pointerId, event.offsetX);
    const {window: [start, stop], x, spread} = this.grip;
    const size = stop - start;
    if (spread !== null && this.spread() !== null) {
      this.grip.moved = true;
      const middle = [...this.pointers.values()].reduce((sum, one) => sum + one, 0) / this.pointers.size;
      const share = middle / this.wide;
      const wanted = size * (spread / this.spread());
      this.move(start + size * share - wanted * share, start + size * share + wanted * (1 - share));
    } else if (Math.abs(event.offsetX - x) > 5 || this.grip.moved) {
      this.grip.moved = true;
      if (!this.zoomed) return;
      this.canvas.classList.add("drag");
      const shift = ((x - event.offsetX) / this.wide) * size;
      this.move(start + shift, stop + shift);
    }
  }

  up(event, done) {
    this.pointers.delete(event.pointerId);
    this.canvas.classList.remove("drag");
    if (done && this.grip && !this.grip.moved && this.view) this.on.select(this.at(event.offsetX));
    if (!this.pointers.size) this.grip = null;
  }

  hover(block, x = 0, y = 0) {
    this.over = block;
    this.tip.hidden = !block;
    if (block) {
      const [first, ...rest] = lines(block);
      const swatch = document.createElement("i");
      swatch.className = "swatch";
      swatch.style.setProperty("--c", color(block.region));
      const name = document.createElement("b");
      name.append(swatch, first);
      this.tip.replaceChildren(name, rest.join(" · "));
      const wide = this.tip.offsetWidth;
      this.tip.style.left = `${Math.max(0, Math.min(x + 14, this.wide - wide))}px`;
      this.tip.style.top = `${y + 18}px`;
    }
    this.draw();
  }

  key(event) {
    if (!this.view || event.ctrlKey || event.metaKey || event.altKey) return;
    const blocks = this.view.blocks;
    const place = this.picked ? blocks.indexOf(this.picked) : -1;
    const to = {
      ArrowLeft: place < 0 ? blocks.length - 1 : place - 1,
      ArrowDown: place < 0 ? blocks.length - 1 : place - 1,
      ArrowRight: place + 1,
      ArrowUp: place + 1,
      PageDown: Math.max(0, place - 10),
      PageUp: Math.min(blocks.length - 1, place + 10),
      Home: 0,
      End: blocks.length - 1,
    }[event.key];
    if (to !== undefined) {
      const block = blocks[to];
      if (block) this.on.select(block);
      else if (this.zoomed && blocks.length) {
        const size = this.stop - this.start;
        this.move(this.start + (to < 0 ? -size / 2 : size / 2), this.stop + (to < 0 ? -size / 2 : size / 2));
      }
    } else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.on.window(null);
    else if (event.key === "Escape") this.on.select(null);
    else return;
    event.preventDefault();
  }
}

/** A block in a few words: its name, then its facts. */
export function lines(block) {
  const name = block.spans === 1 ? shown(block.id) : `${count(block.spans)} spans, ${shown(block.first)} to ${shown(block.last)}`;
  const found = [name, regionName(block.region), plural(block.stop - block.start, "token")];
  found.push(`${block.resident} % resident`);
  if (block.compressed) found.push(`${count(block.compressed)} entries stand for the rest`);
  if (block.retrievable) found.push(`${block.retrievable} % retrievable`);
  if (block.positions) found.push(`positions ${count(block.positions[0])} to ${count(block.positions[1])}`);
  if (block.pin) found.push(`${block.pin} pin`);
  if (block.next === 0) found.push("read by the current step");
  else if (block.next) found.push(`read in ${plural(block.next, "step")}`);
  return found;
}
