// Shows what /watch tells: a message a second with the router's status and the requests that have ended since.
// Nothing is asked of anybody else, and nothing is kept but the token, for as long as the tab is open.

const KEPT_S = 300, LATELY_S = 60;
const $ = (id) => document.getElementById(id);
let ended = [], before = null;

const ms = (s) => (s * 1e3 < 10 ? (s * 1e3).toFixed(1) : Math.round(s * 1e3).toLocaleString("en"));
const short = (n) => Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(n);
const quantile = (values, p) => {
  if (!values.length) return NaN;
  const sorted = [...values].sort((a, b) => a - b), rank = (sorted.length - 1) * p, low = Math.floor(rank);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (rank - low);
};

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The stream

async function watch() {
  const token = sessionStorage.getItem("token");
  try {
    const answer = await fetch("/watch", { headers: token ? { Authorization: `Bearer ${token}` } : {} });
    if (answer.status === 401) return askForToken(token);
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let held = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the router has closed the stream");
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) show(JSON.parse(event.slice("data: ".length)));
    }
  } catch (error) {
    say("bad", `not connected: ${error.message}`);
    before = null;
    setTimeout(watch, 2000);
  }
}

function askForToken(wrong) {
  say("wait", "a token is wanted");
  $("refused").textContent = wrong ? "That token is not known here." : "";
  $("door").hidden = false;
  $("token").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value.trim());
  $("door").hidden = true;
  watch();
});

function say(state, text) {
  Object.assign($("health"), { textContent: text }).dataset.state = state;
}

// What it tells

function show(told) {
  const status = told.status, now = Date.now() / 1e3;
  ended.push(...told.ended.map((request) => ({ ...request, at_s: now - request.age_s })));
  ended = ended.filter((request) => now - request.at_s < KEPT_S);
  $("about").textContent = `${status.model || "no model yet"} at ${status.router_id}`;
  document.title = `kvrelay: ${status.model}`;
  say(told.ready ? "good" : "bad", told.ready ? "serving" : "a phase has no worker");
  showTiles(told, now);
  for (const key of ["ttft", "tpot"]) showChart($(key), key, told.targets[key], now);
  showCluster(status);
  showPairs(status);
  showSlow(told.targets);
  before = { status, now };
}

const met = (request, targets) =>
  !request.failed && ["ttft", "tpot"].every((key) => !targets[key] || request[`${key}_s`] <= targets[key]);

function showTiles(told, now) {
  const { status, targets } = told, lately = ended.filter((request) => now - request.at_s < LATELY_S);
  const good = lately.filter((request) => !request.failed), seconds = Math.min(LATELY_S, Math.max(1, status.uptime_s));
  const since = (key) => (before ? (count(status, key) - count(before.status, key)) / (now - before.now) : NaN);
  const held = sum(status.workers, "total_pages") - sum(status.workers, "available_pages");
  const inTime = lately.filter((request) => met(request, targets)).length;
  const tiles = [
    ["requests/s", (lately.length / seconds).toFixed(2), `ended, last ${LATELY_S} s`],
    ["tokens/s", short(Math.max(0, since("generation_tokens")) || 0), "to clients"],
    ["in flight", status.num_in_flight, `${status.num_queued} more in the queue`],
    ["TTFT P50 / P90", pair(good, "ttft_s"), target(targets.ttft), over(good, "ttft_s", targets.ttft)],
    ["TPOT P50 / P90", pair(good, "tpot_s"), target(targets.tpot), over(good, "tpot_s", targets.tpot)],
    ["goodput", `${(inTime / seconds).toFixed(2)}/s`, lately.length ? `${Math.round((100 * inTime) / lately.length)}% in time` : "nothing ended"],
    ["KV in use", `${Math.round((100 * held) / Math.max(1, sum(status.workers, "total_pages")))}%`, `${short(held)} pages`],
    ["failed", short(count(status, "failed")), `${short(count(status, "retries"))} sent again, since the start`],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, more, is_over]) => element("div", {},
    element("dt", { textContent: name }),
    element("dd", { className: is_over ? "over" : "" }, String(value), element("small", { textContent: more })))));
}

const sum = (workers, key) => workers.reduce((total, worker) => total + (worker[key] || 0), 0);
const count = (status, key) => Number(status.counters[key] || 0);
const target = (limit_s) => (limit_s ? `target ${ms(limit_s)} ms` : "no target");
const over = (requests, key, limit_s) => Boolean(limit_s) && quantile(requests.map((r) => r[key]), 0.9) > limit_s;
const pair = (requests, key) => {
  const values = requests.map((request) => request[key]);
  return values.length ? `${ms(quantile(values, 0.5))} / ${ms(quantile(values, 0.9))}` : "–";
};

function showChart(svg, key, limit_s, now) {
  const [width, height, left, bottom] = [svg.clientWidth, svg.clientHeight, 52, 20];
  const points = ended.filter((request) => request.failed || key === "ttft" || request.output_tokens > 1);
  const values = points.map((request) => request[`${key}_s`]);
  const most = 1.15 * Math.max(1e-3, limit_s || 0, quantile(values, 0.98) || 0);
  const x = (at_s) => left + (width - left - 8) * (1 - (now - at_s) / KEPT_S);
  const y = (value) => (height - bottom) * (1 - Math.min(value, most) / most) + 4;
  const lines = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
    drawn("line", { x1: left, x2: width - 8, y1: y(share * most), y2: y(share * most) }),
    drawn("text", { x: left - 6, y: y(share * most) + 4, "text-anchor": "end" }, ms(share * most)),
  ]);
  const times = [0, 100, 200, 300].map((ago) =>
    drawn("text", { x: Math.max(x(now - ago), left + 10), y: height - 5, "text-anchor": ago ? "middle" : "end" }, ago ? `-${ago} s` : "now"));
  const dots = points.map((request) => drawn("circle", {
    cx: x(request.at_s), cy: y(request[`${key}_s`]), r: 2.5,
    class: request.failed || (limit_s && request[`${key}_s`] > limit_s) ? "missed" : "met",
  }));
  const wanted = limit_s ? [drawn("line", { x1: left, x2: width - 8, y1: y(limit_s), y2: y(limit_s), class: "target" })] : [];
  svg.replaceChildren(...lines, ...times, ...wanted, ...dots);
}

function showCluster(status) {
  const pools = new Map();
  for (const worker of status.workers) pools.set(worker.role, [...(pools.get(worker.role) || []), worker]);
  $("cluster").replaceChildren(...[...pools].map(([role, workers]) => {
    const pool = element("div", { className: "pool" }, element("h3", { textContent: `${workers.length} × ${role}` }));
    pool.dataset.role = role;
    pool.append(...workers.map(card));
    return pool;
  }));
}

function card(worker) {
  const counters = worker.counters, held = worker.total_pages - worker.available_pages;
  const lines = [`${worker.num_running} run, ${worker.num_waiting} wait, ${short(worker.waiting_tokens)} prompt tokens to read`];
  const bytes = Number(counters.bytes_sent || 0), receipts = Number(counters.receipts_good || 0);
  if (bytes) lines.push(`relayed ${short(bytes)}B in ${short(counters.handoffs || receipts)} handoffs`);
  if (receipts) lines.push(`${short(receipts)} good receipts, ${short(counters.receipts_bad || 0)} bad`);
  if (Number(counters.prefix_lookup_tokens)) {
    lines.push(`${Math.round((100 * Number(counters.prefix_hit_tokens || 0)) / Number(counters.prefix_lookup_tokens))}% of prompt tokens were cached`);
  }
  if (worker.losses) lines.push(`lost ${worker.losses} times`);
  if (worker.reason) lines.push(worker.reason);
  const pages = element("meter", { min: 0, max: Math.max(1, worker.total_pages), value: held, title: `${held} of ${worker.total_pages} pages are held` });
  pages.setAttribute("aria-label", `${worker.name}: KV pages held`);
  return element("article", { className: "card" },
    element("h4", {}, worker.name, element("span", { className: `state-${worker.state}`, textContent: worker.state })),
    pages, ...lines.map((text) => element("p", { textContent: text })));
}

function fill(table, heads, rows) {
  table.replaceChildren(
    element("thead", {}, element("tr", {}, ...heads.map((text) => element("th", { textContent: text, scope: "col" })))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text) => element("td", { textContent: text }))))));
}

function showPairs(status) {
  const rows = status.workers.flatMap((worker) => worker.pairs.map((other) =>
    [`${worker.name} → ${other.peer}`, other.failures, `${other.age_s.toFixed(0)} s ago`, other.reason]));
  $("pairs-section").hidden = !rows.length;
  fill($("pairs"), ["pair", "failures", "last", "why"], rows);
}

function showSlow(targets) {
  const worst = (request) => (request.failed ? Infinity : request.ttft_s / (targets.ttft || 1));
  const slowest = [...ended].sort((a, b) => worst(b) - worst(a)).slice(0, 8);
  fill($("slow"), ["ended", "prompt", "cached", "output", "TTFT ms", "TPOT ms", "handoff ms", ""], slowest.map((request) => [
    new Date(request.at_s * 1e3).toLocaleTimeString(), request.prompt_tokens, request.cached_tokens, request.output_tokens,
    ms(request.ttft_s), ms(request.tpot_s), request.handoff_s ? ms(request.handoff_s) : "–",
    request.failed ? "failed" : met(request, targets) ? "in time" : "late",
  ]));
}

watch();
