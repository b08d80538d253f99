// Lists the slow requests that the router keeps, and opens the timeline of one: its parts, which cover its time, each with
// what went on meanwhile.

import { $, ago, drawn, element, head, ms, say, whole } from "./dom.js";
import { headers } from "./token.js";

const EVERY_MS = 3000, LAST = 20;
const HEADS = ["request", "ended", "TTFT ms", "TPOT ms", "in all, ms", "prompt", "output", "why"];
let kept = [], shown = "";

async function told(path) {
  const answer = await fetch(path, { headers: headers() });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message || `${answer.status}`);
  return body;
}

export async function askForSlow(isIdle) {
  if (!isIdle()) {
    try {
      kept = (await told(`v1/requests?last=${LAST}`)).requests;
      say($("slow-note"), kept.length ? "A request's name opens its timeline." : "No request was slow, or failed.");
    } catch {
      kept = [];
      say($("slow-note"), "This router does not answer now.");
    }
  }
  setTimeout(askForSlow, EVERY_MS, isIdle);
}

export function showSlow() {
  const names = JSON.stringify(kept.map(nameOf));
  if (names === shown) return;
  const focused = document.activeElement?.dataset?.name; // its row may be made anew
  $("slow").replaceChildren(head(HEADS), element("tbody", {}, ...kept.map(row)));
  [...$("slow").querySelectorAll("button")].find((button) => button.dataset.name === focused)?.focus();
  shown = names;
}

const nameOf = (request) => `${request.request_id}/${request.choice}`;

function row(request) {
  const open = element("button", { type: "button", className: "link", textContent: request.request_id.slice(0, 16) });
  open.dataset.name = nameOf(request);
  open.setAttribute("aria-label", `Timeline of ${request.request_id}`);
  open.addEventListener("click", () => showTimeline(request));
  const ended = new Date(Date.now() - (request.age_s - request.e2e_s) * 1e3).toLocaleTimeString();
  const values = [ended, ms(request.ttft_s), ms(request.tpot_s), ms(request.e2e_s), whole(request.prompt_tokens), whole(request.output_tokens)];
  const why = [request.state === "failed" ? `✕ failed: ${request.reason}` : "", request.why].filter(Boolean).join("; ");
  return element("tr", {}, element("td", {}, open), ...[...values, why].map((text) => element("td", { textContent: text })));
}

async function showTimeline({ request_id, choice }) {
  say($("timeline-title"), `Timeline of ${request_id}`);
  say($("timeline-about"), "asking the router");
  $("spans").replaceChildren();
  $("timeline").showModal();
  try {
    const { choices } = await told(`v1/requests/${encodeURIComponent(request_id)}`);
    const request = choices.find((each) => each.choice === choice) || choices[0];
    say($("timeline-about"), about(request));
    $("spans").replaceChildren(...request.spans.map((span) => part(span, request)));
  } catch (error) {
    say($("timeline-about"), error.message);
  }
}

function about(request) {
  const tokens = `${whole(request.prompt_tokens)} prompt tokens (${whole(request.cached_tokens)} cached), ${whole(request.output_tokens)} written`;
  const times = `first token after ${ms(request.ttft_s)} ms, all after ${ms(request.e2e_s)} ms, ${ago(request.age_s)} ago`;
  const more = [request.attempts > 1 ? `${request.attempts} attempts` : "", request.moves ? `${request.moves} moves` : "", request.why];
  return [times, tokens, ...more].filter(Boolean).join("; ");
}

function part(span, request) {
  const title = element("p", {}, element("b", { textContent: span.name.replaceAll("_", " ") }), ` ${span.worker || "router"} `,
    element("span", { className: "took", textContent: `${ms(span.end_s - span.begin_s)} ms from ${ms(span.begin_s)} ms` }));
  const made = element("li", {}, title, bar(span, request));
  if (span.words) made.append(element("small", { textContent: span.words }));
  if (span.details?.length) made.append(element("ol", { className: "spans" }, ...span.details.map((detail) => part(detail, request))));
  return made;
}

function bar(span, request) {
  const share = (s) => Math.min(100, Math.max(0, (100 * s) / Math.max(request.e2e_s, 1e-9)));
  const begin = share(span.begin_s), width = Math.max(0.5, share(span.end_s) - begin), first = `${share(request.ttft_s)}%`;
  return drawn("svg", { class: "bar", "aria-hidden": "true" },
    drawn("rect", { x: `${Math.min(begin, 99.5)}%`, width: `${width}%`, height: "100%", class: `span ${span.name}` }),
    ...(request.ttft_s ? [drawn("line", { x1: first, x2: first, y1: 0, y2: "100%", class: "target" })] : []));
}
