"use strict";
// What /live tells after each look, drawn. All text comes from other programs: it is set as text, and never as HTML.

const KEPT = 600; // seconds of curves and events
const byId = (id) => document.getElementById(id);
const groups = new Map(); // by key: what was told of each group, with all points and events
let chosen = null; // the key of the group that the user has chosen
let shownWorker = null;

// --- words --------------------------------------------------------------------------------------------------------

const short = (n) => (n < 9.95 ? n.toFixed(1).replace(/\.0$/, "") : n.toFixed(0));
function rate(n) { return n == null ? "" : n <= 0 ? "0" : n < 0.095 ? n.toFixed(2) : short(n); }
function size(n) {
  if (n == null) return "";
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 999.5) return (unit === "B" ? n.toFixed(0) : short(n)) + " " + unit;
    n /= 1000;
  }
  return short(n) + " TB";
}
function duration(s) {
  if (s == null) return "";
  if (s < 0.0009995) return short(s * 1e6) + " µs";
  if (s < 0.9995) return short(s * 1e3) + " ms";
  if (s < 120) return short(s) + " s";
  return s < 7200 ? short(s / 60) + " min" : short(s / 3600) + " h";
}
const clock = (t) => new Date(t * 1000).toLocaleTimeString([], { hour12: false });

// --- elements -----------------------------------------------------------------------------------------------------

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
function draw(tag, properties = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Fill a table. columns: title, class; rows: of cells, each a text or [text, class]. empty: said if there are none. */
function table(id, columns, rows, empty, each = () => {}) {
  const head = make("tr", {}, ...columns.map(([title, kind = ""]) => make("th", { class: kind, scope: "col" }, title)));
  const body = rows.map((cells, number) => {
    const row = make("tr", {}, ...cells.map((cell, place) => {
      const [text, kind] = Array.isArray(cell) ? cell : [cell, ""];
      const td = make("td", { class: `${columns[place][1] || ""} ${kind || ""}`.trim() }, text);
      if (td.classList.contains("long")) td.title = text;
      return td;
    }));
    each(row, number);
    return row;
  });
  if (!body.length) body.push(make("tr", {}, make("td", { class: "empty", colSpan: columns.length }, empty)));
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.row : null;
  byId(id).replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  if (focused) byId(id).querySelector(`[data-row="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

// --- what comes ---------------------------------------------------------------------------------------------------

function take(message) {
  if (message.whole) groups.clear();
  const keys = new Set(message.groups.map((each) => each.key));
  for (const key of groups.keys()) if (!keys.has(key)) groups.delete(key);
  for (const each of message.groups) {
    const known = groups.get(each.key);
    const points = (known ? known.points : []).concat(each.points).filter((p) => p.time > message.time - KEPT);
    const events = (known ? known.events : []).concat(each.events).filter((e) => e.time > message.time - KEPT);
    groups.set(each.key, { ...each, points, events, now: message.time });
  }
  byId("link").textContent = message.trouble || "live";
  byId("link").className = message.trouble ? "off" : "";
  show();
}

function current() {
  if (groups.has(chosen)) return groups.get(chosen);
  const all = [...groups.values()];
  const living = all.filter((each) => !each.gone);
  return (living.length ? living : all).at(-1);
}

function show() {
  const group = current();
  byId("empty").hidden = !!group;
  byId("whole").hidden = !group;
  showChoice(group);
  if (!group) { byId("title").textContent = ""; return; }
  const { shown } = group;
  byId("title").textContent = (group.gone ? `ended ${clock(group.gone)}: ` : "") + `${shown.dynamic ? "free group" : "group"} at ${shown.title || "?"}`;
  showFindings(shown.findings);
  showTiles(group);
  showWorkers(shown.workers, !!group.gone);
  showTraffic(shown);
  showWaits(shown);
  showCalls(shown.calls);
  showNames(shown.names);
  showQueues(shown.queues);
  showEvents(group);
  showCharts(group);
}

function showChoice(group) {
  const select = byId("group");
  const names = [...groups.values()].map((each) => {
    const workers = each.shown.workers.map((worker) => worker.name);
    return [each.key, workers.slice(0, 3).join(", ") + (workers.length > 3 ? ` and ${workers.length - 3} more` : "") + (each.gone ? " (ended)" : "")];
  });
  select.hidden = names.length < 2;
  const text = JSON.stringify(names);
  if (select.dataset.names !== text) {
    select.dataset.names = text;
    select.replaceChildren(...names.map(([key, name]) => make("option", { value: key }, name)));
  }
  if (group) select.value = group.key;
}

function showFindings(findings) {
  const list = byId("findings");
  list.hidden = !findings.length;
  list.replaceChildren(...findings.map((each) => make("li", {}, make("b", {}, each.kind), each.text)));
}

function showTiles(group) {
  const { shown } = group;
  const last = group.gone ? null : group.points.at(-1);
  const state = (wanted) => shown.workers.filter((worker) => worker.state === wanted).length;
  const living = group.gone ? 0 : shown.workers.length - state("lost") - state("unseen");
  const losses = group.events.filter((event) => event.what === "WorkerLost").length;
  const missing = shown.workers.length - living;
  const tiles = [
    ["workers", missing ? `${living} of ${shown.workers.length}` : `${living}`, missing && !group.gone],
    ["calls a second", last ? rate(last.calls) : "–"],
    ["failed a second", last ? rate(last.failed) : "–"],
    ["median, 99 %", last && last.p50 != null ? `${duration(last.p50)}, ${duration(last.p99)}` : "–"],
    ["sent a second", last ? size(last.sent) : "–"],
    ["losses", `${losses}`],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value, bad]) =>
    make("div", { class: bad ? "bad" : "", "data-tile": name }, make("b", {}, value), make("span", {}, name))));
}

function showWorkers(workers, gone) {
  const columns = [["worker", "name"], ["role", "wide"], ["state"], ["process", "wide"], ["up", "n wide"], ["made/s", "n"],
    ["served/s", "n"], ["failed/s", "n"], ["under way", "n"], ["sent/s", "n"], ["received/s", "n"], ["loop late", "n"], ["memory", "n"]];
  const rows = workers.map((worker) => {
    const r = worker.rates;
    const late = !r ? "" : r.silent ? [`stands, ${duration(r.silent)}`, "bad"] : [duration(r.lag), r.lag > 0.1 ? "slow" : ""];
    const state = gone ? "ended" : worker.state;
    const numbers = r ? [rate(r.made), rate(r.served), [rate(r.failed), r.failed ? "bad" : ""],
      `${r.pending + r.running + r.queued}`, size(r.sent), size(r.received), late, size(r.memory)] : Array(8).fill("");
    return [worker.name, worker.role, [state, `state ${state}`], worker.pid ? `${worker.pid} at ${worker.host}` : "",
      worker.uptime ? duration(worker.uptime) : "", ...numbers];
  });
  table("workers", columns, rows, "none", (row, number) => {
    const worker = workers[number];
    row.tabIndex = 0;
    row.dataset.row = worker.name;
    row.title = worker.why || "stacks and log";
    row.onclick = () => openWorker(worker);
    row.onkeydown = (event) => { if (event.key === "Enter") openWorker(worker); };
  });
}

const sent = (flow) => (!flow ? "" : flow.rate < 0.5 ? ["0", "empty"] : size(flow.rate));

function showTraffic({ workers, flows }) {
  const names = workers.filter((worker) => worker.state !== "lost").map((worker) => worker.name);
  const rates = new Map(flows.map((flow) => [`${flow.sender} ${flow.receiver}`, flow]));
  const most = Math.max(1, ...flows.map((flow) => flow.rate));
  const rows = names.map((from) => [from, ...names.map((to) => (from === to ? ["·", "empty"] : sent(rates.get(`${from} ${to}`))))]);
  table("traffic", [["", ""], ...names.map((name) => [name, ""])], rows, "none", (row, number) => {
    const from = row.cells[0];
    from.replaceWith(make("th", { scope: "row" }, names[number]));
    names.forEach((to, place) => {
      const flow = rates.get(`${names[number]} ${to}`);
      const cell = row.cells[place + 1];
      if (!flow || !flow.rate) return;
      const share = Math.max(0.06, Math.log1p(flow.rate) / Math.log1p(most)) ** 3;
      cell.style.backgroundColor = `rgba(${style("--heat")}, ${(0.45 * share).toFixed(3)})`;
      cell.title = `${names[number]} to ${to}: ${size(flow.rate)} a second` + (flow.unsent > 4096 ? `, ${size(flow.unsent)} wait` : "");
    });
  });
}

function showWaits({ workers, waits }) {
  const names = workers.map((worker) => worker.name);
  for (const wait of waits) for (const name of [wait.worker, wait.to]) if (!names.includes(name)) names.push(name);
  const states = new Map(workers.map((worker) => [worker.name, worker.state]));
  const width = 460, height = 280, rx = 150, ry = 100, r = 13;
  const place = new Map(names.map((name, number) => {
    const angle = -Math.PI / 2 + (2 * Math.PI * number) / names.length;
    return [name, names.length === 1 ? [width / 2, height / 2] : [width / 2 + rx * Math.cos(angle), height / 2 + ry * Math.sin(angle)]];
  }));
  const edges = new Map();
  for (const wait of waits) {
    const key = `${wait.worker} ${wait.to}`;
    const edge = edges.get(key) || { ...wait, count: 0 };
    edge.count += 1;
    edge.circle ||= wait.circle;
    edges.set(key, edge);
  }
  const arrow = (id, kind) => draw("marker", { id, class: kind, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse", markerUnits: "userSpaceOnUse" }, draw("path", { d: "M0 0 8 4 0 8z" }));
  const parts = [draw("defs", {}, arrow("arrow", ""), arrow("arrow-circle", "circle"))];
  for (const edge of edges.values()) {
    const [[x1, y1], [x2, y2]] = [place.get(edge.worker), place.get(edge.to)];
    const kind = edge.circle ? "circle" : "";
    const marker = `url(#arrow${edge.circle ? "-circle" : ""})`;
    if (edge.worker === edge.to) {
      parts.push(draw("path", { class: kind, "marker-end": marker, d: `M${x1 - 6} ${y1 - r} C${x1 - 34} ${y1 - 48} ${x1 + 34} ${y1 - 48} ${x1 + 6} ${y1 - r}` }));
      continue;
    }
    const length = Math.hypot(x2 - x1, y2 - y1), ux = (x2 - x1) / length, uy = (y2 - y1) / length, bend = 16;
    const mx = (x1 + x2) / 2 - uy * bend, my = (y1 + y2) / 2 + ux * bend;
    parts.push(draw("path", { class: kind, "marker-end": marker, "data-edge": `${edge.worker} ${edge.to}`, d: `M${x1 + ux * r} ${y1 + uy * r} Q${mx} ${my} ${x2 - ux * (r + 3)} ${y2 - uy * (r + 3)}` }));
    const text = duration(edge.since) + (edge.count > 1 ? `, ${edge.count} calls` : "");
    parts.push(draw("text", { class: "label", x: (mx + (x1 + x2) / 2) / 2, y: (my + (y1 + y2) / 2) / 2 + 4, "text-anchor": "middle" }, text));
  }
  if (!waits.length) parts.push(draw("text", { class: "label", x: width / 2, y: height / 2 + 4, "text-anchor": "middle" }, "nothing has waited for a second"));
  const busy = new Set(waits.flatMap((wait) => [wait.worker, wait.to]));
  const around = new Set(waits.filter((wait) => wait.circle).flatMap((wait) => [wait.worker, wait.to]));
  for (const [name, [x, y]] of place) {
    const above = y < height / 2 - 1, side = Math.abs(y - height / 2) <= 1 ? (x > width / 2 ? 1 : -1) : 0;
    const text = draw("text", {
      x: x + side * (r + 6), y: side ? y + 4 : y + (above ? -r - 6 : r + 15),
      "text-anchor": side ? (side > 0 ? "start" : "end") : "middle",
    }, name);
    const kind = `${around.has(name) ? "circle" : busy.has(name) ? "busy" : ""} ${states.get(name) === "lost" ? "lost" : ""}`;
    parts.push(draw("g", { class: kind.trim() }, draw("circle", { cx: x, cy: y, r }), text));
  }
  byId("graph").replaceChildren(draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "who waits for whom" }, ...parts));
  byId("waits").replaceChildren(...waits.slice(0, 20).map((wait) => make("li", { class: wait.circle ? "bad" : "" },
    make("span", { class: "since" }, duration(wait.since)),
    `${wait.worker}${wait.by ? ` (${wait.by})` : ""} waits for ${wait.function} on ${wait.to}: ${wait.state}`,
    make("span", { class: "at" }, [wait.made_at && `made at ${wait.made_at}`, wait.stands_at && `stands at ${wait.stands_at}`].filter(Boolean).join("; ")))));
}

function showCalls(calls) {
  const columns = [["worker", "name"], [""], ["peer"], ["function", "long"], ["calls/s", "n"], ["failed/s", "n"], ["median", "n"], ["99 %", "n"]];
  table("calls", columns, calls.slice(0, 40).map((call) => [call.worker, call.side === "made" ? "calls" : "serves", call.peer, call.function,
    rate(call.rate), [call.failed ? rate(call.failed) : "", "bad"], duration(call.p50), duration(call.p99)]), "no call has ended");
}

function showNames(names) {
  const columns = [["name", "name"], ["reader"], ["version", "n"], ["behind", "n"], ["age", "n"]];
  const rows = names.flatMap((each) => [
    [each.name, `published by ${each.owner}`, `${each.version}`, "", duration(each.age)],
    ...each.readers.map((reader) => ["", reader.worker, `${reader.version}`, [`${reader.behind}`, reader.behind > 3 ? "slow" : ""], duration(reader.age)]),
  ]);
  table("names", columns, rows, "nothing is published");
}

function showQueues(queues) {
  const columns = [["queue", "name"], ["owner"], ["items", "n"], ["room for", "n"], ["getters wait", "n"], ["putters wait", "n"], ["unfinished", "n"]];
  table("queues", columns, queues.map(({ owner, queue: q }) => [q.name, owner, `${q.length || 0}`, q.maxsize ? `${q.maxsize}` : "any",
    `${q.getters || 0}`, `${q.putters || 0}`, `${q.unfinished || 0}`]), "there is none");
}

// --- the time line ------------------------------------------------------------------------------------------------

const WORDS = { WorkerJoined: "joined", WorkerLeft: "left", WorkerLost: "was lost", WorkerReplaced: "returned", WorkerSuspended: "has broken its line", WorkerResumed: "has its line again" };

function showEvents({ events, shown, now }) {
  const names = [...new Set([...shown.workers.map((worker) => worker.name), ...events.map((event) => event.worker)])];
  const wide = window.innerWidth > 760, width = wide ? 1200 : 420, left = wide ? 110 : 76, row = 22, bottom = names.length * row + 6;
  const x = (time) => left + ((time - (now - KEPT)) / KEPT) * (width - left - 10);
  const parts = [];
  for (let minutes = 10; minutes >= 0; minutes -= 2) {
    const at = x(now - minutes * 60);
    parts.push(draw("line", { x1: at, x2: at, y1: 2, y2: bottom }));
    parts.push(draw("text", { x: at, y: bottom + 15, "text-anchor": minutes ? "middle" : "end" }, minutes ? `-${minutes} min` : "now"));
  }
  names.forEach((name, number) => {
    const y = number * row + 14;
    parts.push(draw("line", { x1: left, x2: width - 10, y1: y, y2: y }));
    parts.push(draw("text", { x: 0, y: y + 4 }, name.length > 15 ? `${name.slice(0, 14)}…` : name));
  });
  for (const event of events) {
    const mark = draw("circle", { class: event.what, cx: x(event.time), cy: names.indexOf(event.worker) * row + 14, r: 5.5 });
    mark.append(draw("title", {}, `${clock(event.time)} ${event.worker} ${WORDS[event.what] || event.what}`));
    parts.push(mark);
  }
  byId("timeline").replaceChildren(draw("svg", { viewBox: `0 0 ${width} ${bottom + 22}`, role: "img", "aria-label": "losses and returns" }, ...parts));
  byId("events").replaceChildren(...events.slice(-30).reverse().map((event) => make("li", { "data-what": event.what },
    make("time", {}, clock(event.time)), `${event.worker} ${WORDS[event.what] || event.what}`, make("span", { class: "at" }, event.text))));
}

// --- curves -------------------------------------------------------------------------------------------------------

const charts = new Map(); // by element: the chart, and what its series are
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const isTen = (t) => t > 0 && Math.abs(Math.log10(t) - Math.round(Math.log10(t))) < 1e-6;

function chart(id, labels, data, words, logarithmic = false) {
  const place = byId(id);
  const kind = JSON.stringify(labels);
  const known = charts.get(id);
  if (known && known.kind === kind) {
    known.plot.setData(data);
    if (known.plot.cursor.idx == null || known.plot.cursor.left < 0) known.plot.setLegend({ idx: data[0].length - 1 });
    return;
  }
  if (known) known.plot.destroy();
  place.replaceChildren();
  const axis = { stroke: style("--soft"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const plot = new uPlot({
    width: place.clientWidth || 400, height: 180,
    padding: [8, 8, 0, 0],
    cursor: { points: { size: 6 }, drag: { x: false, y: false } },
    scales: { y: logarithmic ? { distr: 3 } : { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] } },
    axes: [
      { ...axis, values: (_, ticks) => ticks.map((t) => new Date(t * 1000).toLocaleTimeString([], { hour12: false, hour: "2-digit", minute: "2-digit", second: "2-digit" })), space: 80, size: 26 },
      { ...axis, size: 62, grid: { ...axis.grid, filter: (_, ticks) => ticks.map((t) => (!logarithmic || isTen(t) ? t : null)) }, values: (_, ticks) => ticks.map((t) => (t == null ? "" : words(t))) },
    ],
    series: [
      { label: "at", value: (_, t) => (t == null ? "" : clock(t)) },
      ...labels.map((label, number) => ({ label, stroke: style(`--c${(number % 6) + 1}`), width: 1.6, points: { show: false }, spanGaps: true, value: (_, v) => (v == null ? "" : words(v)) })),
    ],
  }, data, place);
  plot.setLegend({ idx: data[0].length - 1 });
  charts.set(id, { plot, kind });
}

function showCharts({ points }) {
  const times = points.map((p) => p.time);
  const of = (get) => points.map((p) => get(p) ?? null);
  chart("chart-calls", ["calls", "failed"], [times, of((p) => p.calls), of((p) => p.failed)], rate);
  chart("chart-latency", ["median", "99 %"], [times, of((p) => p.p50), of((p) => p.p99)], duration, true);
  chart("chart-sent", ["sent"], [times, of((p) => p.sent)], size);
  const queues = [...new Set(points.flatMap((p) => Object.keys(p.queues)))].slice(0, 6);
  chart("chart-queues", queues.length ? queues : ["no queue"], [times, ...(queues.length ? queues : [""]).map((name) => of((p) => p.queues[name]))], rate);
}

function restyle() {
  for (const { plot } of charts.values()) plot.destroy();
  charts.clear();
  show();
}

// --- one worker ---------------------------------------------------------------------------------------------------

async function openWorker(worker) {
  shownWorker = worker;
  const dialog = byId("worker");
  byId("worker-name").textContent = worker.name;
  byId("worker-facts").textContent = [worker.role && `role ${worker.role}`, worker.state, `process ${worker.pid} at ${worker.host}`,
    worker.metrics && `metrics at ${worker.metrics}`, worker.why].filter(Boolean).join(", ");
  byId("worker-stacks").textContent = byId("worker-log").textContent = "looking …";
  if (!dialog.open) dialog.showModal();
  try {
    const answer = await fetch(`/worker?${new URLSearchParams({ name: worker.name, pid: worker.pid })}`);
    if (!answer.ok) throw new Error(`the dashboard answers ${answer.status}`);
    const told = await answer.json();
    if (shownWorker !== worker) return;
    byId("worker-stacks").textContent = told.stacks;
    byId("worker-log").textContent = told.log.join("\n") || "nothing was logged";
    byId("worker-log").scrollTop = byId("worker-log").scrollHeight;
  } catch (error) {
    byId("worker-stacks").textContent = `not available: ${error.message}`;
    byId("worker-log").textContent = "";
  }
}

// --- begin --------------------------------------------------------------------------------------------------------

byId("group").onchange = (event) => { chosen = Number(event.target.value); show(); };
byId("again").onclick = () => openWorker(shownWorker);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
new ResizeObserver(() => {
  for (const [id, { plot }] of charts) plot.setSize({ width: byId(id).clientWidth || 400, height: 180 });
}).observe(document.querySelector("main"));
const live = new EventSource("/live"); // it connects anew by itself
live.onmessage = (event) => take(JSON.parse(event.data));
live.onerror = () => { byId("link").textContent = "no connection to the dashboard"; byId("link").className = "off"; };
