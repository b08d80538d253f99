// Shows what /watch tells: a message a second with the router's status, the requests that have ended since, and what was
// decided. Nothing is asked of anybody else, and nothing is kept but the token, for as long as the tab is open.

import { showChart } from "./charts.js";
import { showCards, showPairs } from "./cluster.js";
import { showDeeds } from "./deeds.js";
import { $, say } from "./dom.js";
import { showPicture } from "./picture.js";
import { askForSlow, showSlow } from "./requests.js";
import { headers, keepToken } from "./token.js";
import { showTiles } from "./tiles.js";
import { pairsOf } from "./pairs.js";

const KEPT_S = 300, RATES_S = 10;
let ended = [], deeds = [], history = [], last = null, isPaused = false;

async function watch() {
  try {
    const answer = await fetch("watch", { headers: headers() });
    if (answer.status === 401) return askForToken();
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let held = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the router has closed the stream");
      const events = (held + value).split("\n\n");
      held = events.pop();
      for (const event of events) take(JSON.parse(event.slice("data: ".length)));
      draw();
    }
  } catch (error) {
    health("bad", `not connected: ${error.message}`);
    history = [];
    setTimeout(watch, 2000);
  }
}

function askForToken() {
  health("wait", "a token is wanted");
  say($("refused"), "Authorization" in headers() ? "That token is not known here." : "");
  $("door").hidden = false;
  $("token").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  keepToken($("token").value.trim());
  $("door").hidden = true;
  watch();
});

$("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  $("pause").setAttribute("aria-pressed", isPaused);
  draw();
});

document.addEventListener("visibilitychange", () => draw());

function health(state, text) {
  $("health").dataset.state = state;
  say($("health"), text);
}

function take(told) {
  const now = Date.now() / 1e3, at = (row) => ({ ...row, at_s: now - row.age_s });
  ended.push(...told.ended.map(at));
  ended = ended.filter((request) => now - request.at_s < KEPT_S);
  if (told.deeds) deeds = told.deeds.map(at);
  const tokens = Number(told.status.counters.generation_tokens), pairs = new Map();
  for (const pair of pairsOf(told.status)) pairs.set(pair.name, pair);
  history = [...history.filter((each) => now - each.at_s < RATES_S), { at_s: now, tokens, pairs }];
  last = told;
}

function draw() {
  if (!last || isPaused || document.hidden) return;
  const { status, targets } = last, now = Date.now() / 1e3, first = history[0], newest = history[history.length - 1];
  const lately = (key) => (newest ? Math.max(0, key(newest) - key(first)) / Math.max(1, newest.at_s - first.at_s) : 0);
  const pairs = [...(newest ? newest.pairs.values() : [])].map((pair) => ({
    ...pair,
    rate: lately((each) => (each.pairs.get(pair.name) || pair).bytes),
    isFailing: pair.failures > 0 || lately((each) => (each.pairs.get(pair.name) || pair).bad) > 0,
  }));
  const models = status.models.slice(1).length ? status.models.join(", ") : status.model;
  say($("about"), `${models || "no model yet"} at ${status.router_id}`);
  document.title = `kvrelay: ${models}`;
  health(last.ready ? "good" : "bad", last.ready ? "● serving" : "✕ a phase has no worker");
  showTiles(last, ended, lately((each) => each.tokens), now);
  for (const key of ["ttft", "tpot"]) showChart($(key), key, ended, targets[key], now, KEPT_S);
  showPicture($("picture"), status.workers, pairs);
  showCards(status.workers);
  showPairs(pairs);
  showDeeds(deeds, now);
  showSlow();
}

watch();
askForSlow(() => isPaused || document.hidden || !last);
