// Tells each worker, and each pair of them, in words: what the picture shows.

import { $, ago, element, fill, ms, short, sum, whole } from "./dom.js";

const MOST_PAIRS = 40;
const ORDER = ["prefill", "mixed", "decode"]; // as in the picture
const MARKS = { ready: "●", lost: "✕", suspect: "✕" };
export const marked = (state) => `${MARKS[state] || "▲"} ${state}`;

export function showCards(workers) {
  const pools = new Map(ORDER.map((role) => [role, []]));
  for (const worker of workers) pools.set(worker.role, [...(pools.get(worker.role) || []), worker]);
  $("cluster").replaceChildren(...[...pools].filter(([, members]) => members.length).map(([role, members]) => {
    const pool = element("div", { className: "pool" }, element("h3", { textContent: `${members.length} × ${role}` }));
    pool.dataset.role = role;
    pool.append(...members.map(card));
    return pool;
  }));
}

function card(worker) {
  const counters = worker.counters, held = worker.total_pages - worker.available_pages;
  const lines = [`${worker.num_running} run, ${worker.num_waiting} wait, ${short(worker.waiting_tokens)} prompt tokens to read`];
  const receipts = worker.receipts || [], bytes = sum(receipts, "bytes");
  if (receipts.length) lines.push(`handed over ${short(bytes)}B: ${whole(sum(receipts, "good"))} good receipts, ${whole(sum(receipts, "bad"))} bad`);
  if (Number(counters.bytes_received)) lines.push(`took ${short(counters.bytes_received)}B: ${short(counters.receipts_good || 0)} good receipts, ${short(counters.receipts_bad || 0)} bad`);
  if (Number(counters.prefix_lookup_tokens)) {
    lines.push(`${Math.round((100 * Number(counters.prefix_hit_tokens || 0)) / Number(counters.prefix_lookup_tokens))}% of prompt tokens were cached`);
  }
  if (worker.losses) lines.push(`lost ${worker.losses} times`);
  if (worker.reason) lines.push(worker.reason);
  const pages = element("meter", { min: 0, max: Math.max(1, worker.total_pages), value: held, title: `${held} of ${worker.total_pages} pages are held` });
  pages.setAttribute("aria-label", `${worker.name}: KV pages held`);
  return element("article", { className: "card" },
    element("h4", {}, worker.name, element("span", { className: `state-${worker.state}`, textContent: marked(worker.state) })),
    pages, ...lines.map((text) => element("p", { textContent: text })));
}

export function showPairs(pairs) {
  const sorted = [...pairs].sort((a, b) => b.isFailing - a.isFailing || b.rate - a.rate || b.bytes - a.bytes);
  const health = (pair) =>
    !pair.isFailing ? "● well" : pair.failures ? `✕ ${pair.failures} failed in a row, ${ago(pair.age_s)} ago: ${pair.reason}` : "✕ some failed just now";
  const rows = sorted.slice(0, MOST_PAIRS).map((pair) => [
    pair.name, whole(pair.good), whole(pair.bad), whole(pair.resends), `${short(pair.bytes)}B`, `${short(pair.rate)}B/s`,
    pair.good ? ms(pair.exposed_s / pair.good) : "–", health(pair),
  ]);
  $("pairs-section").hidden = !rows.length;
  $("pairs-more").textContent = sorted.length > MOST_PAIRS ? `and ${sorted.length - MOST_PAIRS} more` : "";
  fill($("pairs"), ["pair", "good", "bad", "sent again", "bytes", "last 10 s", "exposed ms", "health"], rows);
}
