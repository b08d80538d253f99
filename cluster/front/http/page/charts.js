// Draws a latency of each request over the time of its end, against its target.

import { drawn, ms, quantile } from "./dom.js";

const NAMES = { ttft: "Time to first token", tpot: "Time per output token" };

export function showChart(svg, key, ended, limit_s, now, kept_s) {
  const [width, height, left, bottom] = [svg.clientWidth, svg.clientHeight, 52, 20];
  const points = ended.filter((request) => request.failed || key === "ttft" || request.output_tokens > 1);
  const values = points.map((request) => request[`${key}_s`]);
  const isMissed = (request) => request.failed || (limit_s && request[`${key}_s`] > limit_s);
  const most = 1.15 * Math.max(1e-3, limit_s || 0, quantile(values, 0.98) || 0);
  const x = (at_s) => left + (width - left - 8) * (1 - (now - at_s) / kept_s);
  const y = (value) => (height - bottom) * (1 - Math.min(value, most) / most) + 4;
  const lines = [0, 0.25, 0.5, 0.75, 1].flatMap((share) => [
    drawn("line", { x1: left, x2: width - 8, y1: y(share * most), y2: y(share * most) }),
    drawn("text", { x: left - 6, y: y(share * most) + 4, "text-anchor": "end" }, ms(share * most)),
  ]);
  const times = [0, 100, 200, 300].map((ago) =>
    drawn("text", { x: Math.max(x(now - ago), left + 10), y: height - 5, "text-anchor": ago ? "middle" : "end" }, ago ? `-${ago} s` : "now"));
  const wanted = limit_s ? [drawn("line", { x1: left, x2: width - 8, y1: y(limit_s), y2: y(limit_s), class: "target" })] : [];
  const marks = points.map((request) => mark(x(request.at_s), y(request[`${key}_s`]), isMissed(request)));
  svg.replaceChildren(...lines, ...times, ...wanted, ...marks);
  const missed = points.filter(isMissed).length;
  svg.setAttribute("aria-label", `${NAMES[key]} of ${points.length} requests: ${values.length ? ms(quantile(values, 0.5)) : "no"} ms at the median, ${missed} missed or failed`);
}

function mark(x, y, isMissed) {
  if (!isMissed) return drawn("circle", { cx: x, cy: y, r: 2.5, class: "met" });
  return drawn("path", { d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6`, class: "missed" });
}
