"use strict";
// Ids and tenants are text from callers. They reach the document only as text nodes; the policy that this page is served
// with refuses anything else.

const POLL_MS = 1000, HIDDEN_POLL_MS = 10_000, TIMEOUT_MS = 10_000, PAGE_SIZE = 50, MAX_HISTORY = 120;
const byId = (id) => document.getElementById(id);
const rows = new Map();         // the rows of requests, by id: a row keeps its place in the document, and its focus
let csrfToken = "";
let pages = [""];               // the tokens of the pages up to the one that is shown
let nextToken = "";
let before = null;              // the statistics of the previous answer
let answeredAt = Date.now();
let wanted = null;              // the request that the dialog is about
let timer = 0;
let round = 0;                  // counts the polls, so that a late answer to an old one is ignored
const history = [];

function element(tag, parent, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  if (parent) parent.append(made);
  return made;
}

const whole = (number) => number.toLocaleString("en", { maximumFractionDigits: 0 });
const fixed = (number, digits = 1) =>
  number.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const ms = (seconds) => seconds < 1 ? `${fixed(1000 * seconds)} ms` : `${fixed(seconds, 2)} s`;

function duration(exact) {
  const seconds = Math.floor(exact), two = (number) => String(number).padStart(2, "0");
  if (seconds < 60) return `${fixed(exact)} s`;
  const days = Math.floor(seconds / 86_400), hours = Math.floor(seconds / 3600) % 24;
  return `${days ? `${days} d ` : ""}${hours}:${two(Math.floor(seconds / 60) % 60)}:${two(seconds % 60)}`;
}

// Calls to the server ------------------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function call(path, options = {}) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS), ...options });
  if (response.ok) return response.json();
  let error = {};
  try { error = (await response.json()).error; } catch { /* from another server, such as a proxy */ }
  throw new Refused(response.status, error.code, error.message || `HTTP ${response.status} ${response.statusText}`);
}

const post = (path, body) => call(path, {
  method: "POST",
  headers: { "Content-Type": "application/json", "X-CSRF-Token": csrfToken },
  body: JSON.stringify(body),
});

async function poll() {
  clearTimeout(timer);
  const mine = ++round;
  const query = new URLSearchParams({ page_size: PAGE_SIZE, page_token: pages.at(-1) });
  try {
    const answer = await call(`api/status?${query}`);
    if (mine === round) show(answer);
  } catch (error) {
    if (mine === round) await showProblem(error);
  }
  if (mine === round && byId("login").hidden) timer = setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

async function showProblem(error) {
  if (error.status === 401 || (error.status === 403 && error.code === "admin_denied")) {
    showLogin(error.code === "login_required" ? "" : error.message);
  } else if (error.status === 400 && pages.length > 1) {
    pages = [""];               // the service is another one, which does not know the page
  } else {
    const reason = error instanceof Refused ? error.message : "the server of this page does not answer";
    const silence = `No status for ${duration((Date.now() - answeredAt) / 1000)}`;
    byId("gone").textContent = `${silence}: ${reason}. The page keeps trying.`;
    byId("gone").hidden = false;
    document.body.classList.add("stale");
    document.title = "gone · penstock";
  }
}

// The view -----------------------------------------------------------------------------------------------------------

function show(answer) {
  csrfToken = answer.csrf_token;
  answeredAt = Date.now();
  byId("gone").hidden = true;
  byId("login").hidden = true;
  byId("view").hidden = false;
  byId("logout").hidden = !answer.has_session;
  document.body.classList.remove("stale");
  const stats = answer.stats, state = stats.state.toUpperCase();
  document.title = `${state} · penstock`;
  byId("state").textContent = state;
  byId("state").classList.toggle("good", state === "SERVING");
  byId("uptime").textContent = `up ${duration(stats.uptime)}`;
  showNow(stats);
  showWindows([stats.last_10s, stats.last_60s]);
  showTotals(stats);
  showTenants(stats);
  showHistory(stats);
  showRequests(answer);
  before = stats;
}

function facts(list, pairs) {
  list.replaceChildren();
  for (const [name, value] of pairs) {
    element("dt", list, name);
    const shown = element("dd", list);
    shown.append(...[value].flat());
  }
}

function showNow(stats) {
  const meter = element("meter");
  meter.max = 1;
  meter.value = stats.kv_usage;
  meter.title = "KV cache";
  const lag = stats.loop_lag;
  const pairs = [
    ["requests", `${whole(stats.live_requests)} live` + (stats.stalled_requests ? `, ${whole(stats.stalled_requests)} stalled` : "")],
    ["rows", `${whole(stats.running_rows)} run, ${whole(stats.waiting_choices)} wait`],
    ["KV", [meter, ` ${fixed(100 * stats.kv_usage)} % held`]],
    ["", `${whole(stats.cached_blocks)} blocks cached, ${whole(stats.retained_blocks)} retained`],
  ];
  if (stats.host_blocks || stats.restored_tokens) {
    pairs.push(["host memory", `${whole(stats.host_blocks)} blocks; ${whole(stats.restored_tokens)} tokens came back`]);
  }
  if (stats.state_slots_used) {
    pairs.push(["states", `${whole(stats.state_slots_used)} slots used, ${whole(stats.state_snapshots)} by saved states; ${whole(stats.state_missed_tokens)} cached tokens computed again for lack of one`]);
  }
  pairs.push(
    ["step", stats.step_duration === null ? "nothing is known yet" : ms(stats.step_duration)],
    ["1st token", stats.predicted_ttft === null ? "nothing is known yet" : `predicted after ${whole(1000 * stats.predicted_ttft)} ms`],
    ["loop late by", lag ? `${ms(lag.p50)} median, ${ms(lag.p99)} p99` : "nothing is known yet"],
  );
  facts(byId("now"), pairs);
}

function showWindows(windows) {
  const perSecond = (name, digits) => (window) =>
    window && window.duration ? fixed(window[name] / window.duration, digits) : "–";
  const percentile = (latency, name) => (window) => window?.[latency]?.count ? ms(window[latency][name]) : "–";
  const lines = [
    ["output tokens/s", perSecond("output_tokens", 0)],
    ["computed prompt tokens/s", perSecond("prefill_tokens", 0)],
    ["requests ended/s", perSecond("finished_requests", 1)],
    ["first token, p50", percentile("time_to_first_token", "p50")],
    ["first token, p90", percentile("time_to_first_token", "p90")],
    ["first token, p99", percentile("time_to_first_token", "p99")],
    ["between tokens, p50", percentile("inter_token_latency", "p50")],
    ["between tokens, p90", percentile("inter_token_latency", "p90")],
    ["between tokens, p99", percentile("inter_token_latency", "p99")],
  ];
  byId("windows").replaceChildren(...lines.map(([name, value]) => {
    const row = element("tr");
    element("td", row, name);
    for (const window of windows) element("td", row, value(window));
    return row;
  }));
}

function showTotals(stats) {
  const pairs = [
    ["output tokens", whole(stats.output_tokens)],
    ["prompt tokens", `${whole(stats.prefill_tokens)} computed, ${whole(stats.cached_tokens)} cached`],
    ["requests", `${whole(stats.finished_requests)} ended, ${whole(stats.refused_requests)} refused`],
    ["steps", whole(stats.steps)],
    ["preempted", whole(stats.preemptions)],
    ["workers replaced", whole(stats.worker_restarts)],
  ];
  if (stats.drafted_tokens) {
    const share = fixed(100 * stats.accepted_tokens / stats.drafted_tokens, 0);
    pairs.push(["drafted tokens", `${whole(stats.drafted_tokens)}, ${share} % accepted`]);
  }
  facts(byId("totals"), pairs);
}

// Seconds between two answers by the service's clock; 0 for the first one, and after a restart.
const secondsSince = (stats) => before && stats.uptime > before.uptime ? stats.uptime - before.uptime : 0;

function showTenants(stats) {
  const seconds = secondsSince(stats);
  const served = new Map((before?.tenants ?? []).map((tenant) => [tenant.tenant, tenant.served_tokens]));
  byId("tenants").replaceChildren(...stats.tenants.map((tenant) => {
    const row = element("tr"), known = served.get(tenant.tenant);
    given(element("td", row), tenant.tenant);
    element("td", row, whole(tenant.live_requests));
    element("td", row, seconds && known !== undefined ? whole((tenant.served_tokens - known) / seconds) : "");
    element("td", row, whole(tenant.served_tokens));
    return row;
  }));
}

function showHistory(stats) {
  const seconds = secondsSince(stats);
  if (!seconds) return;
  history.push((stats.output_tokens - before.output_tokens) / seconds);
  if (history.length > MAX_HISTORY) history.shift();
  const top = Math.max(...history, 1), left = MAX_HISTORY - history.length;
  byId("line").setAttribute("points", history.map((value, i) => `${left + i},${(23 - 22 * value / top).toFixed(2)}`).join(" "));
  byId("top").textContent = whole(Math.max(...history));
}

// The requests -------------------------------------------------------------------------------------------------------

function given(parent, text, className = "") {
  const shown = element("span", parent, text, `given ${className}`);
  shown.title = text;
  return shown;
}

function newRow(live) {
  const row = element("tr"), cells = {};
  const id = element("td", row);
  given(id, live.request_id, "id");
  if (live.client_request_id) given(id, live.client_request_id, "faint");
  given(element("td", row, undefined, "text"), live.tenant);
  cells.state = element("td", row, undefined, "text");
  for (const name of ["age", "prompt", "output"]) cells[name] = element("td", row);
  element("td", row, whole(live.num_choices), "minor");
  cells.priority = element("td", row, undefined, "minor");
  cells.preemptions = element("td", row, undefined, "minor");
  const button = element("button", element("td", row), "Cancel");
  button.type = "button";
  button.setAttribute("aria-label", `Cancel ${live.request_id}`);
  button.addEventListener("click", () => ask(live));
  return { row, cells };
}

function showRequests(answer) {
  const live = answer.requests, body = byId("requests"), seen = new Set();
  if (!live.length && pages.length > 1) pages.pop();     // all of this page have ended
  for (const request of live) {
    seen.add(request.request_id);
    if (!rows.has(request.request_id)) rows.set(request.request_id, newRow(request));
    const { cells } = rows.get(request.request_id);
    cells.state.textContent = request.state;
    cells.age.textContent = duration(request.age);
    cells.prompt.textContent = whole(request.prompt_tokens);
    const most = request.max_tokens * request.num_choices;       // 0 for a request to embed
    cells.output.textContent = most ? `${whole(request.output_tokens)} of ${whole(most)}` : "–";
    cells.priority.textContent = whole(request.priority);
    cells.preemptions.textContent = whole(request.preemptions);
  }
  for (const [id, { row }] of rows) {
    if (seen.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  live.forEach((request, place) => {                      // moves only what is out of place, so that no focus is lost
    const { row } = rows.get(request.request_id);
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
  });
  nextToken = answer.next_page_token;
  byId("none").hidden = live.length > 0;
  byId("pages").hidden = pages.length === 1 && !nextToken;
  byId("page-number").textContent = `page ${pages.length}`;
  byId("previous").disabled = pages.length === 1;
  byId("next").disabled = !nextToken;
}

function turnTo(tokens) {
  pages = tokens;
  poll();
}

function ask(live) {
  wanted = live;
  const list = byId("confirm-facts");
  facts(list, [["request", given(null, live.request_id, "id")], ["tenant", given(null, live.tenant)]]);
  if (live.client_request_id) {
    element("dt", list, "caller's id");
    given(element("dd", list), live.client_request_id);
  }
  byId("confirm").showModal();
}

async function cancelWanted() {
  const id = wanted.request_id, outcome = byId("outcome");
  byId("confirm").close();
  try {
    const { was_live: wasLive } = await post("api/cancel", { request_id: id });
    outcome.textContent = wasLive ? `${id} was cancelled.` : `${id} had ended already.`;
    outcome.classList.remove("wrong");
  } catch (error) {
    outcome.textContent = `${id} was not cancelled: ${error.message}`;
    outcome.classList.add("wrong");
  }
  poll();
}

// The login ----------------------------------------------------------------------------------------------------------

function showLogin(problem) {
  byId("view").hidden = true;
  byId("gone").hidden = true;
  byId("logout").hidden = true;
  byId("state").textContent = byId("uptime").textContent = "";
  byId("login-problem").textContent = problem;
  byId("confirm").close();
  if (byId("login").hidden) {
    byId("login").hidden = false;
    byId("key").focus();
  }
  document.title = "penstock status";
}

byId("login").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  try {
    await post("api/login", { key });
    byId("login").hidden = true;
    pages = [""];
    poll();
  } catch (error) {
    showLogin(error instanceof Refused ? error.message : "The server of this page does not answer.");
  }
});

byId("logout").addEventListener("click", async () => {
  try {
    await post("api/logout", {});
  } catch { /* the next answer shows what is wrong */ }
  before = null;
  poll();
});
byId("previous").addEventListener("click", () => turnTo(pages.slice(0, -1)));
byId("next").addEventListener("click", () => turnTo([...pages, nextToken]));
byId("keep").addEventListener("click", () => byId("confirm").close());
byId("cancel").addEventListener("click", cancelWanted);
document.addEventListener("visibilitychange", () => { if (!document.hidden && byId("login").hidden) poll(); });
poll();
