// Shows the figures of now: rates and latencies of what ended in the last minute, queues, KV.

import { $, element, ms, quantile, short, sum } from "./dom.js";

const LATELY_S = 60;
const count = (status, key) => Number(status.counters[key] || 0);
const target = (limit_s) => (limit_s ? `target ${ms(limit_s)} ms` : "no target");

export const met = (request, targets) =>
  !request.failed && ["ttft", "tpot"].every((key) => !targets[key] || request[`${key}_s`] <= targets[key]);

export function showTiles({ status, targets }, ended, tokensPerS, now) {
  const lately = ended.filter((request) => now - request.at_s < LATELY_S);
  const good = lately.filter((request) => !request.failed), seconds = Math.min(LATELY_S, Math.max(1, status.uptime_s));
  const inTime = lately.filter((request) => met(request, targets)).length;
  const pages = sum(status.workers, "total_pages"), held = pages - sum(status.workers, "available_pages");
  const waiting = sum(status.workers, "num_waiting");
  const tiles = [
    ["requests/s", (lately.length / seconds).toFixed(2), `ended, last ${LATELY_S} s`],
    ["tokens/s", short(tokensPerS), "to clients, last 10 s"],
    ["in flight", short(status.num_in_flight), "requests that workers have"],
    ["queued", short(status.num_queued), `here; ${short(waiting)} wait at workers`],
    ["TTFT P50 / P90", ...latency(good, "ttft_s", targets.ttft)],
    ["TPOT P50 / P90", ...latency(good, "tpot_s", targets.tpot)],
    ["goodput", `${(inTime / seconds).toFixed(2)}/s`, lately.length ? `${Math.round((100 * inTime) / lately.length)}% in time` : "nothing ended"],
    ["KV in use", `${Math.round((100 * held) / Math.max(1, pages))}%`, `${short(held)} of ${short(pages)} pages`],
    ["failed", short(count(status, "failed")), `${short(count(status, "retries"))} sent again, since the start`],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, more, isOver]) => element("div", {},
    element("dt", { textContent: name }),
    element("dd", { className: isOver ? "bad" : "" }, value, element("small", { textContent: more })))));
}

function latency(requests, key, limit_s) {
  const values = requests.map((request) => request[key]), p90 = quantile(values, 0.9), isOver = Boolean(limit_s) && p90 > limit_s;
  const told = values.length ? `${ms(quantile(values, 0.5))} / ${ms(p90)}` : "–";
  return [told, `${isOver ? "✕ over the " : ""}${target(limit_s)}`, isOver];
}
