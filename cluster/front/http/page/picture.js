// Draws the cluster: who reads prompts on the left, who writes on the right, who does both below between them, and a line
// for each pair that has handed KV over. The cards and the table below say the same in words.

import { drawn, short, whole } from "./dom.js";
import { marked } from "./cluster.js";

const HEIGHT = 58, GAP = 18, EDGE = 10, LABELLED = 16, WIDE = 640;
const COLUMNS = { prefill: 0, mixed: 1, decode: 2 };

export function showPicture(svg, workers, pairs) {
  const width = svg.clientWidth, boxes = placed(workers, width);
  const failing = pairs.filter((pair) => pair.isFailing).length;
  const most = Math.max(1, ...pairs.map((pair) => pair.rate));
  const known = pairs.filter((pair) => boxes.has(pair.from) && boxes.has(pair.to));
  const isLabelled = width >= WIDE && known.length <= LABELLED;
  const lines = known.map((pair) => line(boxes.get(pair.from), boxes.get(pair.to), pair, pair.rate / most, isLabelled));
  svg.setAttribute("height", Math.max(HEIGHT, ...[...boxes.values()].map((box) => box.y + HEIGHT)) + EDGE);
  svg.setAttribute("aria-label", `${workers.length} workers, ${pairs.length} pairs that hand over KV, ${failing} of them in trouble. The cards and the table below say the same.`);
  svg.replaceChildren(...lines, ...[...boxes.values()].map(drawBox));
}

function placed(workers, width) {
  const boxWidth = Math.min(220, Math.max(96, width * 0.29)), columns = [[], [], []];
  for (const worker of workers) columns[COLUMNS[worker.role] ?? 1].push(worker);
  const lefts = [EDGE, (width - boxWidth) / 2, width - boxWidth - EDGE];
  const below = Math.max(columns[0].length, columns[2].length);
  return new Map(columns.flatMap((members, column) => members.map((worker, row) => [worker.name, {
    worker, column, x: lefts[column], y: EDGE + (row + (column === 1 ? below : 0)) * (HEIGHT + GAP), width: boxWidth,
  }])));
}

function line(from, to, pair, share, isLabelled) {
  const [x1, x2, bend] = ends(from, to), y1 = from.y + HEIGHT * 0.4, y2 = to.y + HEIGHT * 0.6;
  const [c1, c2] = [x1 + bend * (from.column <= to.column ? 1 : -1), x2 - bend * (from.column < to.column ? 1 : -1)];
  const state = pair.isFailing ? "failing" : pair.rate ? "busy" : "quiet";
  const path = drawn("path", { d: `M${x1} ${y1}C${c1} ${y1} ${c2} ${y2} ${x2} ${y2}`, class: state, "stroke-width": 1.5 + 6 * Math.sqrt(share) });
  const at = (t, a, b, c, d) => (1 - t) ** 3 * a + 3 * t * (1 - t) ** 2 * b + 3 * t * t * (1 - t) * c + t ** 3 * d;
  const mark = (t, text, name) => drawn("text", { x: at(t, x1, c1, c2, x2), y: at(t, y1, y1, y2, y2) + 4, "text-anchor": "middle", class: name }, text);
  const words = `${pair.name}: ${short(pair.bytes)}B, ${whole(pair.good)} good receipts, ${whole(pair.bad)} bad`;
  const label = isLabelled ? [mark(0.25, `${short(pair.rate)}B/s, ${short(pair.good)} ok${pair.bad ? `, ${short(pair.bad)} bad` : ""}`, "label")] : [];
  return drawn("g", {}, drawn("title", {}, words), path, ...(pair.isFailing ? [mark(0.6, "✕", "cross")] : []), ...label);
}

function ends(from, to) {
  if (from.column < to.column) return [from.x + from.width, to.x, (to.x - from.x - from.width) / 2];
  if (from.column > to.column) return [from.x, to.x + to.width, (from.x - to.x - to.width) / 2];
  const isRight = from.column === 2; // both ends on the inner side
  return isRight ? [from.x, to.x, -40] : [from.x + from.width, to.x + to.width, 40];
}

function drawBox({ worker, x, y, width }) {
  const held = worker.total_pages - worker.available_pages, share = worker.total_pages ? held / worker.total_pages : 0;
  const fits = Math.floor((width - 26) / 7.5), isNarrow = width < 150;
  const name = worker.name.length > fits ? `${worker.name.slice(0, fits - 1)}…` : worker.name;
  const state = isNarrow ? marked(worker.state)[0] : marked(worker.state);
  const load = `${worker.num_running} run, ${worker.num_waiting} wait`;
  return drawn("g", { class: "box", "data-role": worker.role },
    drawn("title", {}, `${worker.name}: ${worker.state}, ${load}, ${held} of ${worker.total_pages} pages held`),
    drawn("rect", { x, y, width, height: HEIGHT, rx: 8, class: "back" }),
    drawn("rect", { x, y: y + 8, width: 4, height: HEIGHT - 16, class: "role" }),
    drawn("text", { x: x + 12, y: y + 18, class: "name" }, name),
    drawn("text", { x: x + width - 8, y: y + 18, "text-anchor": "end", class: `state-${worker.state}` }, state),
    drawn("text", { x: x + 12, y: y + 34 }, isNarrow ? load : `${load}, KV ${Math.round(100 * share)}%`),
    drawn("rect", { x: x + 12, y: y + 42, width: width - 20, height: 7, rx: 3, class: "pages" }),
    drawn("rect", { x: x + 12, y: y + 42, width: (width - 20) * share, height: 7, rx: 3, class: "held" }));
}
