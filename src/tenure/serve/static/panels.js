// The cards around the timeline. Each is filled again only when its data has changed.

import {
  REASONS, REGIONS, ago, byId, bytes, color, compact, count, fill, follow, h, plural, regionName, shown, visible,
} from "./dom.js";

const percent = (part, whole) => (whole ? Math.min(100, (100 * part) / whole) : 0);

const meter = (share, tint, ...more) =>
  h("span", {class: "meter", color: tint}, h("i", {width: `${share}%`}), ...more);

export function sessionList(list, items, current, pick) {
  follow(
    list,
    items,
    (item) => item.id,
    (item) =>
      h("li", {}, h("button", {type: "button", onclick: () => pick(item.id)},
        h("b"), meter(0), h("small", {}, h("span"), h("span")))),
    (node, item) => {
      const button = node.firstElementChild;
      const [name, bar, small] = button.children;
      name.textContent = shown(item.title || item.id);
      button.title = shown(item.id);
      bar.firstElementChild.style.width = `${percent(item.resident, item.budget ?? item.resident)}%`;
      small.children[0].textContent = `${compact(item.tokens)} tokens`;
      small.children[1].textContent =
        item.state === "idle" && item.used ? ago(Date.now() / 1000 - item.used) : (item.state ?? "");
      if (item.id === current) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    },
  );
}

const tile = (title, big, unit, sub, foot) =>
  h("div", {class: "tile"}, h("dt", {}, title),
    h("dd", {class: "big"}, big, unit ? h("small", {}, ` ${unit}`) : null),
    h("dd", {class: "sub"}, sub), foot ? h("dd", {}, foot) : null);

export function tiles(view, speed) {
  const {budget, pinned, limit} = view;
  const saved = view.full_kv_bytes > view.kv_bytes ? `an unbounded cache holds ${bytes(view.full_kv_bytes)}` : "";
  fill(byId("tiles"), [view, speed], () => [
    tile("Tokens so far", count(view.tokens), "",
      plural(view.spans, "span") + (view.waiting > 1 ? `, ${plural(view.waiting, "token")} waiting` : ""), mix(view)),
    tile("In the cache", count(view.resident), budget ? `of ${count(budget)}` : "slots",
      [pinned.hard + pinned.soft ? `${count(pinned.hard + pinned.soft)} pinned` : "slots of each layer and head",
        view.compressed ? `${count(view.compressed)} more, compressed` : null].filter(Boolean).join(", "),
      meter(percent(view.resident, budget ?? view.resident), null,
        h("i", {class: "pins", width: `${percent(pinned.hard, budget ?? view.resident)}%`}))),
    tile("Planned reads", view.planned.resident === null ? "–" : `${view.planned.resident} %`,
      view.planned.resident === null ? "" : "resident",
      view.planned.resident === null ? "no coming step reads a span" : `${plural(view.planned.spans, "span")}, ${plural(view.planned.tokens, "token")}`,
      meter(view.planned.resident ?? 0)),
    tile("Rotary position", count(view.next_position), limit ? `of ${count(limit)}` : "",
      `${view.positions}${view.renumbers ? `, renumbered ${count(view.renumbers)} time${view.renumbers === 1 ? "" : "s"}` : ""}`,
      limit ? meter(percent(view.next_position, limit)) : null),
    tile("Cache memory", bytes(view.kv_bytes), "", saved || "allocated once",
      meter(percent(view.kv_bytes, Math.max(view.kv_bytes, view.full_kv_bytes)))),
    tile("Speed", speed.now === null ? "–" : compact(speed.now), "tokens/s", speed.peak ? `at most ${compact(speed.peak)}` : "read and written", sparkline(speed.rates)),
  ]);
}

/** What the session's tokens are, by region. */
const mix = (view) =>
  h("span", {class: "mix"}, ...REGIONS.filter((name) => view.regions[name]?.tokens).map((name) =>
    h("i", {color: color(name), width: `${percent(view.regions[name].tokens, view.tokens)}%`, title: regionName(name)})));

function sparkline(rates) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 118 30");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, place) => `${118 - 2 * (rates.length - 1 - place)},${(28.5 - (26 * rate) / most).toFixed(1)}`);
  for (const [name, d] of points.length > 2
    ? [["area", `M${points.join("L")}L118,30L${118 - 2 * (points.length - 1)},30Z`], ["line", `M${points.join("L")}`]]
    : []) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("class", name);
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

export function legend(view, region, pick) {
  const known = REGIONS.filter((name) => name in view.regions);
  const tiered = view.blocks.some((block) => block.retrievable);
  fill(byId("legend"), [known, region, tiered, view.compressed > 0], () => [
    ...known.map((name) =>
      h("li", {}, h("button", {type: "button", color: color(name), "aria-pressed": String(name === region), onclick: () => pick(name)},
        h("i", {class: "swatch"}), regionName(name)))),
    h("li", {class: "note", color: "var(--accent)"}, h("i", {class: "swatch"}), "a step reads it"),
    h("li", {class: "note", color: "var(--ink)"}, h("i", {class: "swatch"}), "pinned"),
    view.compressed > 0 ? h("li", {class: "note"}, h("i", {}, "▒"), "compressed") : null,
    tiered ? h("li", {class: "note"}, h("i", {}, "≡"), "retrievable from a tier") : null,
  ].filter(Boolean));
}

let planTop = 0;

export function plan(view) {
  const {steps, total, finished} = view.plan;
  byId("plan-count").textContent = total ? `${count(finished)} of ${count(total)} done` : "";
  const first = byId("plan").firstElementChild;
  const top = first?.scrollTop;
  const marks = {done: "✓", current: "▸", coming: "○"};
  fill(byId("plan"), view.plan, () =>
    total
      ? h("ol", {class: "steps", tabindex: "0", "aria-labelledby": "plan-title"},
          ...steps.map((step) =>
            h("li", {"data-state": step.state},
              h("span", {class: "mark", "aria-hidden": "true"}, marks[step.state]),
              h("b", {"aria-label": `${shown(step.id)}, ${step.state}`}, shown(step.id)),
              step.reads.length
                ? h("span", {class: "reads"}, `reads ${step.reads.map(shown).join(", ")}${step.more_reads ? ` and ${step.more_reads} more` : ""}`)
                : null)))
      : h("p", {class: "none"}, "No plan: what stays is decided by attention alone. A message’s step and reads make one."));
  // The current step stays in sight, until somebody scrolls away from it.
  const list = byId("plan").firstElementChild;
  if (!total || list === first) return;
  const current = list.querySelector("[data-state=current]") ?? list.lastElementChild;
  const follows = top === undefined || top === planTop;
  list.scrollTop = follows ? current.offsetTop - list.offsetTop - 60 : top;
  if (follows) planTop = list.scrollTop;
}

export function lost(view) {
  const rows = Object.entries(view.evictions);
  const most = Math.max(1, ...rows.map(([, tokens]) => tokens));
  byId("lost-count").textContent = view.evicted ? plural(view.evicted, "slot") : "";
  fill(byId("lost"), rows, () =>
    rows.length
      ? h("ul", {class: "bars"}, ...rows.map(([reason, tokens]) =>
          h("li", {}, h("span", {class: "label"}, shown(reason)), h("span", {class: "value"}, count(tokens)),
            meter(percent(tokens, most)), h("span", {class: "why"}, REASONS[reason] ?? ""))))
      : h("p", {class: "none"}, "Nothing: the budget holds the whole session so far."));
}

export function regions(view) {
  const rows = REGIONS.filter((name) => name in view.regions).map((name) => [name, view.regions[name]]);
  fill(byId("regions"), rows, () =>
    h("ul", {class: "bars"}, ...rows.map(([name, row]) =>
      h("li", {color: color(name)},
        h("span", {class: "label"}, h("i", {class: "swatch"}), regionName(name)),
        h("span", {class: "value"}, `${count(row.resident)} of ${plural(row.tokens, "token")}`),
        meter(percent(row.resident, row.tokens), color(name))))));
}

export function tiers(view) {
  const rows = view.tiers;
  fill(byId("tiers"), [rows, view.traffic], () =>
    view.traffic
      ? [h("ul", {class: "bars"}, ...rows.map((row) =>
          h("li", {}, h("span", {class: "label"}, shown(row.name)),
            h("span", {class: "value"}, `${plural(row.spans, "span")}, ${plural(row.tokens, "token")}`),
            meter(percent(row.tokens, view.tokens))))),
         h("p", {class: "hint"}, traffic(view.traffic))]
      : h("p", {class: "none"}, "No tier: evicted spans do not come back."));
}

function traffic(found) {
  const out = `${plural(found.stored ?? 0, "span")} stored (${bytes(found["bytes out"] ?? 0)})`;
  const back = `${plural(found.hits ?? 0, "span")} brought back (${bytes(found["bytes in"] ?? 0)})`;
  return `${out}, ${back}, ${count(found.misses ?? 0)} missed.`;
}

export function log(entries) {
  fill(byId("log"), entries, () =>
    entries.length
      ? entries.map(([time, text]) => h("li", {}, h("time", {}, time), h("span", {}, text)))
      : h("li", {class: "none"}, "Nothing yet."));
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

export function detail(block, said) {
  const node = byId("detail");
  node.hidden = !block;
  if (!block) return;
  fill(byId("detail-title"), block.id ?? [block.first, block.last], () => [
    h("i", {class: "swatch", color: color(block.region)}),
    block.spans === 1 ? shown(block.id) : `${count(block.spans)} spans: ${shown(block.first)} to ${shown(block.last)}`,
  ]);
  const tokens = block.stop - block.start;
  const mixed = Object.entries(block.regions ?? {}).map(([name, size]) => `${regionName(name)} ${Math.round((100 * size) / tokens)} %`);
  const away = Object.entries(block.evicted).map(([reason, size]) => `${shown(reason)} ${count(size)}`);
  fill(byId("detail-body"), [block, said], () => [
    h("dl", {class: "facts"},
      fact("Region", mixed.length ? mixed.join(", ") : regionName(block.region) + (block.role && block.role !== block.region ? ` (${shown(block.role)})` : "")),
      fact("Tokens", `${count(tokens)}, from ${count(block.start)} to ${count(block.stop - 1)}`),
      fact("Resident", `${block.resident} %`),
      block.retrievable === undefined ? null : fact("Retrievable", `${block.retrievable} %${block.tier ? `, in ${shown(block.tier)}` : ""}`),
      block.compressed ? fact("Compressed", `${count(block.compressed)} entries a layer and head`) : null,
      block.restored ? fact("Brought back", plural(block.restored, "time")) : null,
      fact("Rotary positions", block.positions ? `${count(block.positions[0])} to ${count(block.positions[1])}` : "none: nothing is resident"),
      fact("Distance from the next token", block.gap === null ? "–" : count(block.gap)),
      fact("Pin", block.pin ?? (block.pins ? plural(block.pins, "span") : "none")),
      fact("Read by", readers(block)),
      fact("Evicted, mean over layers", away.length ? away.join(", ") : "nothing")),
    ...(block.by_layer
      ? [h("h4", {}, `Resident share of each layer, ${Math.min(...block.by_layer)} to ${Math.max(...block.by_layer)} %`),
         h("div", {class: "layers", color: color(block.region), "aria-hidden": "true"}, ...block.by_layer.map((share) => h("i", {height: `${Math.max(2, share)}%`})))]
      : []),
    ...Object.keys(block.evicted).filter((reason) => REASONS[reason]).map((reason) => h("p", {class: "hint"}, `${reason}: ${REASONS[reason]}`)),
    ...(block.spans === 1
      ? [h("h4", {}, "Text"), said === null ? h("p", {class: "none"}, "…") : said.error ? h("p", {class: "none"}, said.error)
          : h("pre", {tabindex: "0", "aria-label": "Text of the span", dir: "auto"}, visible(said.text))]
      : [h("p", {class: "hint"}, "Zoom in to see the spans one by one.")]),
  ].filter(Boolean));
}

function readers(block) {
  if (block.spans > 1) return block.next === null ? "none" : block.next === 0 ? "the current step" : `a step, in ${count(block.next)}`;
  if (!block.readers.length) return "no coming step";
  const when = block.next === 0 ? " (now)" : ` (in ${plural(block.next, "step")})`;
  return shown(block.readers[0]) + when + (block.readers.length > 1 ? `, ${block.readers.slice(1).map(shown).join(", ")}` : "") + (block.more_readers ? ` and ${block.more_readers} more` : "");
}

const ROWS = 25;

export function table(view, page, picked, pick) {
  const pages = Math.max(1, Math.ceil(view.blocks.length / ROWS));
  const place = Math.min(page, pages - 1);
  const rows = view.blocks.slice(place * ROWS, (place + 1) * ROWS);
  follow(
    byId("rows"),
    rows,
    (block) => block.id ?? `${block.first}…`,
    () => h("tr", {}, h("td", {}, h("button", {type: "button"})), h("td"), ...[1, 2, 3, 4].map(() => h("td", {class: "n"})), h("td"), h("td")),
    (node, block) => {
      const [, region, from, tokens, resident, positions, reads, away] = node.children;
      const button = node.querySelector("button");
      button.textContent = block.spans === 1 ? shown(block.id) : `${shown(block.first)} … ${shown(block.last)}`;
      button.onclick = () => pick(block);
      region.textContent = regionName(block.region) + (block.pin ? `, ${block.pin} pin` : "");
      from.textContent = count(block.start);
      tokens.textContent = count(block.stop - block.start);
      resident.textContent = `${block.resident} %`;
      positions.textContent = block.positions ? `${count(block.positions[0])}–${count(block.positions[1])}` : "–";
      reads.textContent = block.spans === 1 ? block.readers.slice(0, 2).map(shown).join(", ") || "–" : "";
      away.textContent = Object.entries(block.evicted).map(([reason, size]) => `${shown(reason)} ${count(size)}`).join(", ") || "–";
      node.setAttribute("aria-selected", String(Boolean(picked) && picked.start === block.start));
    },
  );
  const first = place * ROWS;
  byId("page").textContent = view.blocks.length ? `${count(first + 1)} to ${count(first + rows.length)} of ${count(view.blocks.length)}` : "no spans";
  byId("before").disabled = place === 0;
  byId("after").disabled = place >= pages - 1;
  return place;
}
