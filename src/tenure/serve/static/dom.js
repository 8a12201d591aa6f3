// Small helpers. Text of users enters the page as text nodes only, never as markup.

/** An element: h("p", {class: "x", onclick: f}, "text", child). */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "color") node.style.setProperty("--c", value);
    else if (name === "width") node.style.width = value;
    else if (name === "height") node.style.height = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

const drawn = new WeakMap();

/** Fill a node again, only if what it shows has changed, so that focus and selection stay where they are. */
export function fill(node, data, draw) {
  const now = JSON.stringify(data);
  if (drawn.get(node) === now) return;
  drawn.set(node, now);
  const top = node.scrollTop;
  node.replaceChildren(...[draw(data)].flat());
  node.scrollTop = top;
}

/** Make the children of a list follow items by key; children that stay are updated in place. */
export function follow(list, items, key, make, update) {
  const old = new Map([...list.children].map((child) => [child.dataset.key, child]));
  let place = list.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = old.get(name);
    if (node) old.delete(name);
    else {
      node = make(item);
      node.dataset.key = name;
    }
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else list.insertBefore(node, place);
  }
  for (const node of old.values()) node.remove();
}

const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const short = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1});

export const count = (value) => whole.format(value);
export const compact = (value) => (Math.abs(value) < 10000 ? whole.format(value) : short.format(value));
export const plural = (value, word) => `${count(value)} ${word}${Math.round(value) === 1 ? "" : "s"}`;

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${value >= 100 || place === 0 ? Math.round(value) : value.toFixed(1)} ${units[place]}`;
}

export function ago(seconds) {
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

/** Names with characters that cannot be seen, or that turn the text around, made visible. */
export const shown = (text) =>
  String(text).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "\ufffd");

/** The same for a text of several lines. */
export const visible = (text) => String(text).split(/(\r?\n|\t)/).map((part) => (/^\s+$/.test(part) ? part : shown(part))).join("");

export const color = (region) => `var(--${REGIONS.includes(region) ? region : "other"})`;

export const REGIONS = [
  "system", "tools", "plan", "user", "retrieved", "tool_output", "assistant", "scratchpad", "other",
];

export const REASONS = {
  budget: "no step reads it, and other slots scored higher",
  plan: "a step will read it, but what is read sooner filled the budget",
  expired: "every step that read it was done",
  compressed: "fewer entries stand for it; the column compressed counts them",
  superseded: "a newer reading of the same thing took its place",
  spilled: "a step will read it, and it comes back for that from a tier",
  room: "a span that came back from a tier needed its place",
  rollback: "taking back tokens cut all layers to one length",
};

export const regionName = (region) => region.replaceAll("_", " ");
