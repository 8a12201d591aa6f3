// Requests to this server. Paths are relative, so that the page works behind a proxy's prefix too.

const STORE = "tenure.key";

export class Refused extends Error {
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function key() {
  try {
    return sessionStorage.getItem(STORE) ?? "";
  } catch {
    return kept;
  }
}

let kept = "";

export function setKey(value) {
  kept = value;
  try {
    if (value) sessionStorage.setItem(STORE, value);
    else sessionStorage.removeItem(STORE);
  } catch {
    // Storage may be forbidden; the key then lives as long as the page.
  }
}

/** GET, or another method, as JSON. Throws Refused for an answer that is an error, and TypeError where there is no answer. */
export async function get(path, query = {}, method = "GET") {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null));
  const headers = key() ? {Authorization: `Bearer ${key()}`} : {};
  const reply = await fetch(`${path}${search.size ? `?${search}` : ""}`, {
    method,
    headers,
    cache: "no-cache",
    signal: AbortSignal.timeout(15000),
  });
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Refused(reply.status, body.error?.message ?? `status ${reply.status}`, body.error?.code);
  return body;
}

const named = (id) => encodeURIComponent(id);

export const models = () => get("v1/models");
export const sessions = () => get("v1/sessions");
export const memory = (id, query) => get(`v1/sessions/${named(id)}/memory`, query);
export const restore = (id) => get(`v1/sessions/${named(id)}/restore`, {}, "POST");
export const explain = (id, span) => get(`v1/sessions/${named(id)}/explain`, {span});
