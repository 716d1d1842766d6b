"use strict";
// The charts of the last two minutes, over the figures of /metrics. They outlive a reload of the page in the tab's memory.
const $ = id => document.getElementById(id), SPAN = 120, WINDOW = 5, SCALES = {pages: 100, hits: 100};  // seconds
const answers = [];  // those of the last WINDOW seconds, which rates are taken over
let model = null, refusedKey = null, isTicking = false;

function remembered(name, otherwise) { try { return JSON.parse(sessionStorage.getItem(name)) ?? otherwise; } catch (error) { return otherwise; } }
function remember(name, value) { try { sessionStorage.setItem(name, JSON.stringify(value)); } catch (error) { /* no room, or not allowed */ } }
const history = remembered("history", {});  // by chart: rows of a time and values; "accept" has its bars alone
$("key").value = remembered("key", "");
const headers = () => $("key").value ? {Authorization: "Bearer " + $("key").value} : {};
function askForKey() { $("key").hidden = false; refusedKey = $("key").value; }

function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const m = line.match(/^(?:vllm:)?(\w+)(?:\{(.*)\})? (\S+)$/);
    if (!m) continue;
    const labels = Object.fromEntries([...(m[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(x => [x[1], x[2]]));
    (found[m[1]] ??= []).push({labels, value: +m[3]});
  }
  return found;
}
const one = (m, name) => m[name]?.[0]?.value ?? 0;
const sum = (m, name) => (m[name] ?? []).reduce((total, x) => total + x.value, 0);
const rate = (now, then, name) => one(now, name) - one(then, name);

function percentile(now, then, name, share) {
  const key = name + "_bucket", old = then[key] ?? [];
  const counts = (now[key] ?? []).map((b, i) => ({le: b.labels.le === "+Inf" ? Infinity : +b.labels.le, n: b.value - (old[i]?.value ?? 0)}));
  const total = counts.at(-1)?.n ?? 0;
  if (!total) return null;
  let low = 0, under = 0;
  for (const {le, n} of counts) {
    if (n >= share * total) return 1000 * (le === Infinity ? low : low + (le - low) * (share * total - under) / Math.max(n - under, 1));
    low = le; under = n;
  }
}
function byLabel(now, then, name, label) {
  const old = Object.fromEntries((then[name] ?? []).map(x => [x.labels[label], x.value]));
  return (now[name] ?? []).map(x => x.value - (old[x.labels[label]] ?? 0));
}
const written = v => v == null ? "–" : v >= 100 ? Math.round(v) : +v.toFixed(1);
function show(id, ...values) {
  const rows = history[id] ??= [], time = Date.now() / 1000;
  rows.push([time, ...values]);
  while (rows[0][0] < time - SPAN) rows.shift();
  lines(id);
  if (values.every(v => v == null) && rows.some(row => row[1] != null)) return;  // the last value stands
  $("v-" + id).replaceChildren(...values.flatMap((v, i) => {
    const part = document.createElement("span");
    part.textContent = written(v);
    if (values.length > 1) part.className = ["one", "two"][i];
    return i ? [" / ", part] : [part];
  }));
}
function context(canvas) {
  const scale = devicePixelRatio || 1, w = canvas.clientWidth, h = canvas.clientHeight, c = canvas.getContext("2d");
  canvas.width = w * scale; canvas.height = h * scale; c.scale(scale, scale);
  return {c, w, h, ink: name => getComputedStyle(document.documentElement).getPropertyValue(name)};
}
function lines(id) {
  const {c, w, h, ink} = context($("c-" + id)), now = Date.now() / 1000, rows = history[id].filter(row => row[0] >= now - SPAN);
  const top = SCALES[id] ?? Math.max(1e-9, ...rows.flatMap(row => row.slice(1)).filter(v => v != null)), base = h - 13;
  const at = (row, k) => [w * (1 - (now - row[0]) / SPAN), base - (base - 15) * row[k + 1] / top];
  c.strokeStyle = ink("--line"); c.beginPath(); c.moveTo(0, 14.5); c.lineTo(w, 14.5); c.moveTo(0, base + .5); c.lineTo(w, base + .5); c.stroke();
  c.fillStyle = ink("--soft"); c.font = "10px system-ui"; c.fillText(top > 1e-6 ? written(top) : "", 0, 11);
  [["2 min ago", "left", 0], ["1 min", "center", w / 2], ["now", "right", w]].forEach(([text, align, x]) => { c.textAlign = align; c.fillText(text, x, h - 2); });
  ["--a", "--b"].forEach((color, k) => {
    const run = rows.filter(row => row[k + 1] != null).map(row => at(row, k));  // seconds without a value are bridged
    if (!run.length) return;
    c.strokeStyle = ink(color); c.lineWidth = 1.8; c.lineJoin = "round"; c.beginPath();
    run.forEach(([x, y], i) => i ? c.lineTo(x, y) : c.moveTo(x, y));
    if (run.length === 1) c.lineTo(run[0][0] + 2, run[0][1]);
    c.stroke();
    if (k === 0) { c.lineTo(run.at(-1)[0], base); c.lineTo(run[0][0], base); c.fillStyle = ink("--fill"); c.fill(); }
  });
}
function bars(values) {
  const {c, w, h, ink} = context($("c-accept")), step = Math.min(w / Math.max(values.length, 1), 60);
  $("v-accept").textContent = values.length ? values.map(v => Math.round(v)).join(" / ") : "–";
  c.font = "10px system-ui"; c.textAlign = "center";
  values.forEach((v, i) => {
    const tall = (h - 18) * v / 100;
    c.fillStyle = ink("--fill"); c.fillRect(i * step + 4, 2, step - 8, h - 18);
    c.fillStyle = ink("--a"); c.fillRect(i * step + 4, h - 16 - tall, step - 8, tall);
    c.fillStyle = ink("--soft"); c.fillText(i + 1, i * step + step / 2, h - 3);
  });
}
function drawAll() { for (const id in history) if (id === "accept") bars(history[id]); else lines(id); }
function duration(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  return days ? `${days} d ${hours % 24} h` : hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}
function facts(now) {
  const info = now.engine_info?.[0]?.labels, began = one(now, "process_start_time_seconds");
  const ends = Object.fromEntries((now.request_success_total ?? []).map(x => [x.labels.finished_reason, x.value]));
  const all = Object.values(ends).reduce((a, b) => a + b, 0), n = v => Math.round(v).toLocaleString("en");
  $("facts").textContent = [info && `context ${n(+info.max_model_len)} tokens`, info?.device, began && `up ${duration(Date.now() / 1000 - began)}`].filter(Boolean).join(" · ");
  $("totals").textContent = `${n(all)} ${all === 1 ? "request" : "requests"}, ${n(ends.abort ?? 0)} aborted, ${n(ends.error ?? 0)} failed, ${n(sum(now, "requests_refused_total"))} refused`;
  const hasDrafter = +(info?.max_drafts ?? 0) > 0;
  document.querySelector("main").classList.toggle("plain", !hasDrafter);
  for (const part of [...document.querySelectorAll(".drafts"), $("legend")]) part.hidden = !hasDrafter;
}
function showPlaces(now, then, seconds) {  // caches beyond the device: their bytes a second, and their pages
  const places = Object.keys(now).map(name => name.match(/^cache_(\w+)_pages_loaded_total$/)?.[1]).filter(Boolean);
  $("places").hidden = !places.length;
  if (!places.length) return;
  [".one", ".two"].forEach((part, k) => {
    const name = places[k], n = key => Math.round(one(now, `cache_${name}_${key}`)).toLocaleString("en");
    $("places").querySelector(part).textContent = name ? `${name}: ${n("pages_loaded_total")} hits, ${n("pages")} kept` : "";
  });
  show("places", ...places.slice(0, 2).map(name => rate(now, then, `cache_${name}_bytes_loaded_total`) / 1e6 / seconds));
}
function showRates(now, then) {
  const seconds = Math.max(now.time - then.time, 1e-3);
  show("tokens", rate(now, then, "generation_tokens_total") / seconds);
  show("ttft", percentile(now, then, "time_to_first_token_seconds", .5), percentile(now, then, "time_to_first_token_seconds", .99));
  show("itl", percentile(now, then, "inter_token_latency_seconds", .5), percentile(now, then, "inter_token_latency_seconds", .99));
  show("queue", one(now, "num_requests_running"), one(now, "num_requests_waiting"));
  showPlaces(now, then, seconds);
  show("pages", 100 * one(now, "kv_cache_usage_perc"));
  const groups = (now.kv_cache_group_usage_perc ?? []).map(g => `${g.labels.group} ${written(100 * g.value)}`);
  $("groups").textContent = groups.length > 1 ? groups.join(", ") : "";
  const asked = rate(now, then, "prefix_cache_queries_total");
  show("hits", asked ? Math.min(100, 100 * rate(now, then, "prefix_cache_hits_total") / asked) : null);
  const tried = byLabel(now, then, "spec_decode_num_draft_tokens_per_pos_total", "position");
  const kept = byLabel(now, then, "spec_decode_num_accepted_tokens_per_pos_total", "position");
  if (tried.some(n => n > 0)) bars(history.accept = tried.map((n, i) => n ? 100 * (kept[i] ?? 0) / n : 0));
  const chosen = byLabel(now, then, "spec_decode_chosen_drafts_total", "num_drafts"), all = chosen.reduce((a, b) => a + b, 0);
  show("drafts", all ? chosen.reduce((sum, n, i) => sum + n * i, 0) / all : null,
       all ? rate(now, then, "spec_decode_num_accepted_tokens_total") / all : null);
}
async function tick() {
  if (isTicking || !$("key").hidden && refusedKey === $("key").value) return;  // a server that needs a key has said so
  isTicking = true;
  try {
    const answer = await fetch("metrics", {headers: headers(), signal: AbortSignal.timeout(10000)});
    $("state").textContent = answer.status === 401 ? "needs a key" : answer.ok ? "serving" : "error " + answer.status;
    $("state").className = answer.ok ? "serving" : "";
    if (answer.status === 401) { askForKey(); return; }
    if (!answer.ok) return;
    if (!$("key").hidden) { $("key").hidden = true; remember("key", $("key").value); }
    const health = await fetch("health");
    if (!health.ok) { $("state").textContent = (await health.json()).error.message; $("state").className = ""; }
    if (!model) { model = (await (await fetch("v1/models", {headers: headers()})).json()).data[0].id; $("model").textContent = model; document.title = model + " · Outrider"; }
    const now = parse(await answer.text());
    now.time = performance.now() / 1000;
    facts(now);
    const last = answers.at(-1);  // counts begin anew with the server, and with its engine
    if (last && ["process_start_time_seconds", "engine_restarts_total"].some(name => one(now, name) !== one(last, name))) answers.length = 0;
    answers.push(now);
    while (answers.length > 2 && now.time - answers[1].time >= WINDOW) answers.shift();
    if (answers[0] !== now) showRates(now, answers[0]);
  } catch (error) { $("state").textContent = "no answer"; $("state").className = ""; model = null; }
  finally { isTicking = false; }
}
$("key").addEventListener("change", tick);
addEventListener("resize", drawAll);
addEventListener("pagehide", () => remember("history", history));
document.addEventListener("visibilitychange", () => remember("history", history));
drawAll(); tick(); setInterval(tick, 1000);
