// Polls the server while the page is looked at, and hands what it says to the timeline and the cards.

import * as api from "./api.js";
import {byId, compact, count, plural, shown} from "./dom.js";
import * as panels from "./panels.js";
import {Timeline} from "./timeline.js";

const EVERY = 1000;
const SLOW = 5000;
const HISTORY = 60;
const MOST_LISTED = 200;

const state = {
  list: [],
  current: hash(),
  window: null,
  view: null,
  picked: null,
  said: null,
  region: null,
  page: 0,
  rates: [],
  last: null,
  log: [],
};

/** The session that the address names. */
function hash() {
  try {
    return decodeURIComponent(location.hash.slice(1)) || null;
  } catch {
    return null; // not a name that this page has written
  }
}

const timeline = new Timeline(
  {canvas: byId("canvas"), overview: byId("overview"), tip: byId("tip")},
  {select, window: setWindow},
);

// -- what the server says ------------------------------------------------------------------------

let timer = null;
let running = false;
let again = false;

/** One round of questions. A round that is asked for while one is under way follows it. */
async function poll() {
  clearTimeout(timer);
  if (running) {
    again = true;
    return;
  }
  running = true;
  let wait = EVERY;
  try {
    const listed = await api.sessions();
    state.list = listed.data;
    choose();
    if (state.current) await look(state.current);
    link("live", "live");
    showList();
  } catch (error) {
    wait = SLOW;
    if (error.status === 401) askKey(api.key() ? "This key is not accepted." : null);
    else if (error.status === 403) link("lost", error.message);
    else link("lost", error.status ? `error ${error.status}` : "no connection");
  } finally {
    running = false;
  }
  if (again) {
    again = false;
    poll();
  } else if (!document.hidden && !byId("ask").open) timer = setTimeout(poll, wait);
}

/** Stay with the session that is shown; else take the one that was used last. */
function choose() {
  if (state.current && state.list.some((item) => item.id === state.current)) return;
  const latest = [...state.list].sort((one, two) => (two.used ?? 0) - (one.used ?? 0))[0];
  open(latest ? latest.id : null, {quiet: true});
}

async function look(id) {
  const [start, stop] = state.window ?? [null, null];
  const ends = state.window && state.view && stop >= state.view.tokens;
  let view;
  try {
    view = await api.memory(id, {start, stop: ends ? null : stop});
  } catch (error) {
    if (error.status !== 404 && error.status !== 409) throw error;
    if (id === state.current) without(error); // deleted since it was listed, or parked
    return;
  }
  if (id !== state.current) return;
  const all = view.window[0] === 0 && view.window[1] >= view.tokens;
  const whole = all ? view : await api.memory(id, {most: 150});
  if (id !== state.current) return;
  note(view);
  state.view = view;
  show(whole);
}

/** Speed and log come from the difference to the view before. */
function note(view) {
  const now = performance.now();
  const {last} = state;
  if (last && last.id === state.current) {
    const seconds = (now - last.now) / 1000;
    const tokens = view.tokens - last.view.tokens;
    state.rates.push(Math.max(0, tokens / seconds));
    state.rates = state.rates.slice(-HISTORY);
    const parts = [];
    if (tokens > 0) parts.push(`${plural(tokens, "token")} read or written`);
    if (tokens < 0) parts.push(`${plural(-tokens, "token")} taken back`);
    const away = [];
    for (const [reason, total] of Object.entries(view.evictions)) {
      const more = total - (last.view.evictions[reason] ?? 0);
      if (more >= 0.5) away.push(`${count(more)} ${shown(reason)}`);
    }
    if (away.length) parts.push(`evicted ${away.join(", ")}`);
    const back = (view.traffic?.hits ?? 0) - (last.view.traffic?.hits ?? 0);
    if (back > 0) parts.push(`${plural(back, "span")} brought back from a tier`);
    if (view.renumbers > last.view.renumbers) parts.push("positions renumbered");
    if (view.plan.current !== last.view.plan.current && view.plan.current) parts.push(`step ${shown(view.plan.current)} began`);
    if (parts.length) {
      state.log.unshift([new Date().toLocaleTimeString("en-GB"), parts.join("; ")]);
      state.log = state.log.slice(0, 200);
    }
  }
  state.last = {id: state.current, now, view};
}

// -- what the page shows -------------------------------------------------------------------------

function show(whole) {
  const {view} = state;
  const item = state.list.find((one) => one.id === state.current) ?? {};
  byId("empty").hidden = true;
  byId("session").hidden = false;
  byId("title").textContent = shown(item.title || state.current);
  document.title = `${shown(item.title || state.current)} · Tenure`;
  const now = item.state ?? "";
  byId("state").textContent = now;
  byId("state").dataset.state = now;
  byId("state").hidden = !now;
  byId("setting").textContent =
    `policy ${view.policy}, ${view.positions} positions, ${view.budget ? `budget ${count(view.budget)}` : "no budget"}, ${plural(view.layers, "layer")}`;
  const recent = state.rates.slice(-5);
  panels.tiles(view, {
    now: recent.length ? recent[recent.length - 1] : null,
    peak: Math.max(0, ...state.rates),
    rates: state.rates,
  });
  panels.legend(view, state.region, (name) => {
    state.region = state.region === name ? null : name;
    timeline.region = state.region;
    redraw();
  });
  timeline.show(view, whole);
  if (state.picked) {
    const before = state.picked;
    state.picked = timeline.find(before);
    if (before.spans !== state.picked.spans) {
      state.said = null;
      fetchText(state.picked); // a block that zooming has taken apart
    }
    panels.detail(state.picked, state.said);
  }
  panels.plan(view);
  panels.lost(view);
  panels.regions(view);
  panels.tiers(view);
  panels.log(state.log);
  if (byId("table-card").open) state.page = panels.table(view, state.page, state.picked, select);
  byId("out").disabled = byId("fit").disabled = !timeline.zoomed;
  byId("in").disabled = view.tokens <= 16;
  byId("end").disabled = view.tokens <= 64;
  byId("end").setAttribute("aria-pressed", String(timeline.zoomed && view.window[1] >= view.tokens));
}

const redraw = () => state.view && show(timeline.whole);

/** The session that is picked cannot be shown now. */
function without(error) {
  byId("session").hidden = true;
  byId("empty").hidden = false;
  byId("empty-title").textContent = shown(state.current);
  byId("empty-text").textContent = error.message;
  byId("restore").hidden = error.code !== "session_parked";
  byId("empty-code").textContent = "";
}

function showList() {
  const wanted = byId("find").value.trim().toLowerCase();
  const matching = state.list.filter((item) => !wanted || `${item.title ?? ""} ${item.id}`.toLowerCase().includes(wanted));
  byId("find").hidden = state.list.length < 8;
  byId("count").textContent =
    matching.length > MOST_LISTED ? `${MOST_LISTED} of ${count(state.list.length)}` : state.list.length ? compact(state.list.length) : "";
  matching.sort((one, two) => (two.used ?? 0) - (one.used ?? 0));
  panels.sessionList(byId("sessions"), matching.slice(0, MOST_LISTED), state.current, open);
  if (!state.list.length) {
    byId("session").hidden = true;
    byId("empty").hidden = false;
    byId("restore").hidden = true;
    byId("empty-title").textContent = "No session yet";
    byId("empty-text").textContent = "Point an OpenAI client at this server; what it says shows up here.";
    byId("empty-code").textContent =
      `curl ${new URL("v1/chat/completions", location.href).href} \\\n  -H 'Content-Type: application/json' \\\n` +
      `  -d '{"model": "${byId("model").textContent || "default"}", "messages": [{"role": "user", "content": "Hello"}]}'`;
  }
}

function link(kind, text) {
  const node = byId("link");
  if (node.dataset.state !== kind || node.textContent !== text) {
    node.dataset.state = kind;
    node.textContent = text;
  }
}

// -- what the user does --------------------------------------------------------------------------

function open(id, {quiet = false} = {}) {
  if (id === state.current && state.view) return;
  Object.assign(state, {current: id, window: null, view: null, picked: null, said: null, region: null, page: 0, rates: [], last: null, log: []});
  timeline.picked = timeline.over = timeline.region = null;
  byId("tip").hidden = true;
  panels.detail(null, null);
  history.replaceState(null, "", id === null ? location.pathname : `#${encodeURIComponent(id)}`);
  if (!quiet) {
    showList();
    poll();
  }
}

function setWindow(range) {
  state.window = range;
  if (state.view && timeline.whole) {
    // Move at once with the blocks that are here; the exact ones follow.
    timeline.view = {...state.view, window: range ?? [0, state.view.tokens]};
    if (!range) timeline.view.blocks = timeline.whole.blocks;
    timeline.draw();
  }
  clearTimeout(timer);
  timer = setTimeout(poll, 60);
}

function select(block) {
  const same = block && state.picked && block.start === state.picked.start && block.spans === state.picked.spans;
  state.picked = block;
  if (!same) state.said = null;
  timeline.pick(block, {reveal: true});
  panels.detail(block, state.said);
  if (byId("table-card").open) state.page = panels.table(state.view, state.page, block, select);
  if (!same) fetchText(block);
}

/** Have the text of the span that is picked. */
async function fetchText(block) {
  if (!block || block.spans !== 1) return;
  const id = state.current;
  let said;
  try {
    said = await api.explain(id, block.id);
  } catch (error) {
    said = {error: error.status === 404 ? "The span is gone." : `Its text cannot be had: ${error.message}`};
  }
  if (id === state.current && state.picked?.id === block.id) {
    state.said = {text: said.text ?? "", error: said.error};
    panels.detail(state.picked, state.said);
  }
}

function askKey(why) {
  const ask = byId("ask");
  link("lost", "needs a key");
  byId("key").hidden = false;
  byId("ask-text").textContent = why ?? "This server asks for a key. It is kept until the tab is closed, in this browser alone.";
  byId("ask-text").classList.toggle("bad", Boolean(why));
  if (!ask.open) ask.showModal();
}

function useKey(value) {
  api.setKey(value);
  byId("ask-key").value = "";
  if (state.list.length) {
    // Somebody else may look now: begin anew, with nothing of what was shown.
    history.replaceState(null, "", location.pathname);
    location.reload();
  } else start();
}

byId("ask-form").addEventListener("submit", () => useKey(byId("ask-key").value.trim()));
byId("ask-forget").addEventListener("click", () => {
  byId("ask").close();
  useKey("");
});
byId("ask").addEventListener("close", () => api.key() && poll());
byId("key").addEventListener("click", () => askKey(null));
byId("restore").addEventListener("click", async () => {
  byId("restore").disabled = true;
  try {
    await api.restore(state.current);
  } catch (error) {
    byId("empty-text").textContent = error.message;
  }
  byId("restore").disabled = false;
  poll();
});
byId("close").addEventListener("click", () => {
  select(null);
  byId("canvas").focus();
});
byId("in").addEventListener("click", () => timeline.view && timeline.zoom(0.5));
byId("out").addEventListener("click", () => timeline.view && timeline.zoom(2));
byId("fit").addEventListener("click", () => setWindow(null));
byId("end").addEventListener("click", () => {
  if (!state.view) return;
  const size = timeline.zoomed ? timeline.stop - timeline.start : Math.ceil(state.view.tokens / 4);
  timeline.move(state.view.tokens - size, state.view.tokens);
});
byId("find").addEventListener("input", showList);
byId("before").addEventListener("click", () => turnPage(-1));
byId("after").addEventListener("click", () => turnPage(1));
byId("table-card").addEventListener("toggle", redraw);

function turnPage(by) {
  state.page = Math.max(0, state.page + by);
  redraw();
}

const THEMES = [["", "◐", "automatic"], ["light", "☀", "light"], ["dark", "☾", "dark"]];

function theme(chosen) {
  const [value, sign, name] = THEMES.find(([one]) => one === chosen) ?? THEMES[0];
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
  byId("theme").firstElementChild.textContent = sign;
  byId("theme").setAttribute("aria-label", `Colours: ${name}`);
  byId("theme").title = `Colours: ${name}`;
  timeline.repaint();
}

byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "";
  const next = THEMES[(THEMES.findIndex(([one]) => one === now) + 1) % THEMES.length][0];
  try {
    if (next) localStorage.setItem("tenure.theme", next);
    else localStorage.removeItem("tenure.theme");
  } catch {
    // Storage may be forbidden; the choice then lives as long as the page.
  }
  theme(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => timeline.repaint());
document.addEventListener("visibilitychange", () => !document.hidden && poll());
window.addEventListener("hashchange", () => open(hash()));

async function start() {
  if (api.key()) byId("key").hidden = false;
  try {
    const found = await api.models();
    byId("model").textContent = shown(found.data?.[0]?.id ?? "");
  } catch {
    // The first poll says what is wrong.
  }
  poll();
}

theme(document.documentElement.dataset.theme ?? "");
start();
