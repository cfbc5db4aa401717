
"use strict";
// Texts of the events are names that guests and users have chosen: they are only ever set as textContent.

const SVG = "http://www.w3.org/2000/svg";
const GLYPHS = { ok: "\u25CF", info: "\u25CB", warning: "\u25B2", error: "\u25A0" };
const RANKS = { ok: 0, info: 0, warning: 1, error: 2 };
// Work per frame, in ms; a frame has 16 ms at 60 Hz.
const FRAME_BUDGET_MS = 6;
// A sparkline has this number of columns, each with the largest value of its time.
const COLUMNS = 60;
// An order that changes by itself changes at most this often, in ms, and not under the pointer or the focus.
const SORT_INTERVAL_MS = 5000;
const RETRY_MS = 10000;
// The longest list in an announcement to screen readers.
const MAX_NEWS = 3;

const byId = (id) => document.getElementById(id);
const rows = byId("rows");
const table = byId("guests");
const details = byId("details");

const guests = new Map();
// Guests from before the connection was lost. Their rows are used again, so that neither focus nor place is lost.
const earlier = new Map();
const state = {
  intervalMs: 1000,
  maxSamples: 300,
  // The server's clock at the newest sample.
  atMs: 0,
  heardAt: 0,
  isComplete: false,
  summary: { guests: 0, omitted: 0, unreadable_vms: 0, unreadable_domains: 0 },
  sort: { key: "attention", descending: true },
  order: [],
  orderIsDirty: false,
  sortedAt: 0,
  view: "all",
  search: "",
  shown: null,
  news: [],
};

// Text

const NUMBER = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits, useGrouping: false }));

function duration(us) {
  if (us < 1000) return `${NUMBER[0].format(us)} \u00B5s`;
  const ms = us / 1000;
  if (ms < 999.5) return `${NUMBER[ms < 10 ? 1 : 0].format(ms)} ms`;
  const s = ms / 1000;
  if (s < 59.95) return `${NUMBER[1].format(s)} s`;
  const minutes = Math.floor(Math.round(s) / 60);
  if (minutes < 60) return parts(minutes, "min", Math.round(s) % 60, "s");
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return parts(hours, "h", minutes % 60, "min");
  return parts(Math.floor(hours / 24), "d", hours % 24, "h");
}

const parts = (major, unit, minor, minorUnit) => `${major} ${unit}` + (minor > 0 ? ` ${minor} ${minorUnit}` : "");

function ago(us) {
  const s = (state.atMs - us / 1000) / 1000;
  if (s < 2) return "just now";
  if (s < 60) return "less than 1 min ago";
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes} min ago`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ago` : `${Math.floor(hours / 24)} d ago`;
}

// Returns the date and the time of this browser's zone.
function dateText(date) {
  if (Number.isNaN(date.getTime())) return "at an unknown time";
  const two = (number) => String(number).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// Elements

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function make(name, className, ...children) {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function makeSvg(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

function makeCell(className, ...children) {
  const cell = make("td", className, ...children);
  cell.setAttribute("role", "cell");
  return cell;
}

function makeBadge() {
  const glyph = make("span", "glyph");
  glyph.setAttribute("aria-hidden", "true");
  const text = document.createElement("span");
  const element = make("span", "first badge", glyph, text);
  return { element, glyph, text };
}

function setBadge(badge, condition) {
  badge.element.dataset.level = condition.level;
  setText(badge.glyph, GLYPHS[condition.level]);
  setText(badge.text, condition.text);
}

function makeSpark(className) {
  const svg = makeSvg("svg", { class: "spark", viewBox: `0 0 ${COLUMNS} 28`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const limit = makeSvg("path", { class: "limit" });
  const curve = makeSvg("path", { class: className });
  svg.append(limit, curve);
  return { svg, limit, curve };
}

// Returns the row of a guest, with the parts of it that change.
function makeRow() {
  const name = make("button", "name");
  name.type = "button";
  const about = make("span", "second");
  const head = make("th", "", name, about);
  head.scope = "row";
  head.setAttribute("role", "rowheader");
  const status = makeBadge();
  const statusDetail = make("span", "second");
  const protection = makeBadge();
  const protectionDetail = make("span", "second");
  const age = make("span", "first");
  const number = make("span", "second");
  const lag = makeSpark("line");
  const pause = make("span", "first");
  const pauses = makeSpark("bars");
  const operation = make("span", "first");
  const operationDetail = make("span", "second");
  const phases = makeSvg("svg", { class: "phases", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
  const row = make(
    "tr",
    "",
    head,
    makeCell("state", status.element, statusDetail),
    makeCell("protection", protection.element, protectionDetail),
    makeCell("age", make("div", "withchart", make("div", "", age, number), lag.svg)),
    makeCell("pause", make("div", "withchart", pause, pauses.svg)),
    makeCell("operation", operation, operationDetail, phases),
  );
  row.setAttribute("role", "row");
  row.hidden = true;
  name.addEventListener("click", () => openDetails(guests.get(Number(row.dataset.id))));
  return {
    row, name, about, status, statusDetail, protection, protectionDetail, age, number, lag, pause, pauses, operation,
    operationDetail, phases,
  };
}

// Guests

const rankOf = (data) => Math.max(RANKS[data.state.level], RANKS[data.protection.level]);
const isProtected = (data) => data.every_ms !== null && data.protection.text !== "not protected" && data.protection.text !== "protector ended";

const keyOf = (data) => `${data.manager}/${data.name}`;

function addOrChange(data) {
  let guest = guests.get(data.id) ?? takeEarlier(data);
  const isNew = guest === undefined;
  if (isNew) guest = { id: data.id, data, samples: [], number: null, parts: makeRow(), rank: 0, isVisible: false, needsCharts: false };
  guests.set(data.id, guest);
  guest.parts.row.dataset.id = data.id;
  const rank = rankOf(data);
  if (rank === 2 && guest.rank < 2 && state.isComplete) state.news.push(guest);
  const isMoved = !isNew && (rank !== guest.rank || data.name !== guest.data.name);
  guest.data = data;
  guest.rank = rank;
  showGuest(guest);
  if (isNew) insert(guest);
  else if (isMoved || state.sort.key === "operation" || state.sort.key === "protection") state.orderIsDirty = true;
  guest.parts.row.hidden = !matches(guest);
}

function takeEarlier(data) {
  const guest = earlier.get(keyOf(data));
  if (guest === undefined) return undefined;
  earlier.delete(keyOf(data));
  guest.id = data.id;
  return guest;
}

function showGuest(guest) {
  const { data, parts: cells } = guest;
  cells.row.dataset.level = data.state.level === "error" || data.protection.level === "error" ? "error" : guest.rank === 1 ? "warning" : "ok";
  setText(cells.name, data.name);
  cells.name.title = data.name;
  const about = [data.manager];
  if (data.qemu !== null) about.push(`QEMU ${data.qemu}`);
  if (data.outdated) about.push("QEMU is out of date");
  setText(cells.about, about.join(" \u00B7 "));
  setBadge(cells.status, data.state);
  setText(cells.statusDetail, data.state.detail ?? "");
  cells.statusDetail.title = data.state.detail ?? "";
  setBadge(cells.protection, data.protection);
  const every = data.every_ms === null ? "" : `every ${duration(data.every_ms * 1000)}`;
  setText(cells.protectionDetail, data.protection.detail ?? (isProtected(data) ? every : ""));
  cells.protectionDetail.title = data.protection.detail ?? "";
  showOperation(guest);
  guest.needsCharts = true;
}

function showOperation(guest) {
  const { operation } = guest.data;
  const cells = guest.parts;
  setText(cells.operation, operation === null ? "none" : operation.name);
  cells.operation.classList.toggle("second", operation === null);
  showOperationTime(guest);
  const boxes = [];
  const widths = (operation?.steps ?? []).map(([, , , us]) => Math.sqrt(us));
  const total = widths.reduce((sum, width) => sum + width, 0);
  let x = 0;
  (operation?.steps ?? []).forEach(([phase], index) => {
    const width = total > 0 ? (widths[index] / total) * 100 : 0;
    const stops = isStopped(phase);
    boxes.push(makeSvg("rect", { class: stops ? "stops" : "runs", x, width, y: stops ? 0 : 3, height: stops ? 10 : 4 }));
    x += width;
  });
  cells.phases.replaceChildren(...boxes);
  cells.phases.style.display = boxes.length > 0 ? "" : "none";
}

const isStopped = (phase) => phase === "suspend" || phase === "renew" || phase === "resume";

function showOperationTime(guest) {
  const { operation } = guest.data;
  if (operation === null) return setText(guest.parts.operationDetail, "");
  const stopped = operation.stopped_us === null ? "" : `stopped ${duration(operation.stopped_us)} \u00B7 `;
  setText(guest.parts.operationDetail, stopped + ago(operation.started_us));
}

function remove(guest) {
  if (guest === undefined) return;
  visibility.unobserve(guest.parts.row);
  guest.parts.row.remove();
  guests.delete(guest.id);
  state.order.splice(state.order.indexOf(guest), 1);
  if (state.shown === guest) details.close();
}

// Keeps all guests until the server has sent them again, with other ids if it was restarted.
function expectAll() {
  for (const guest of [...guests.values(), ...earlier.values()]) {
    guest.samples = [];
    earlier.set(keyOf(guest.data), guest);
  }
  guests.clear();
  state.isComplete = false;
  table.setAttribute("aria-busy", "true");
}

function forgetEarlier() {
  const gone = [...earlier.values()];
  earlier.clear();
  for (const guest of gone) {
    // Its id may be that of another guest by now.
    guest.id = null;
    remove(guest);
  }
}

// Samples

function addSample(guest, sample) {
  guest.samples.push(sample);
  if (guest.samples.length > state.maxSamples) guest.samples.shift();
  guest.needsCharts = true;
}

function showSample(guest) {
  const last = guest.samples.at(-1);
  if (last === undefined) return;
  setText(guest.parts.age, last.ageMs === null ? "" : duration(last.ageMs * 1000));
  setText(guest.parts.number, guest.number === null ? "" : `#${guest.number}`);
  const pause = lastPause(guest);
  setText(guest.parts.pause, pause === null ? "" : duration(pause));
}

function lastPause(guest) {
  for (let index = guest.samples.length - 1; index >= 0; index -= 1) {
    if (guest.samples[index].pauseUs !== null) return guest.samples[index].pauseUs;
  }
  return null;
}

// Returns the largest value of each of `columns` parts of the window; null where there is none.
function columnsOf(samples, value, columns) {
  const windowMs = state.maxSamples * state.intervalMs;
  const start = state.atMs - windowMs;
  const found = new Array(columns).fill(null);
  for (const sample of samples) {
    const column = Math.min(columns - 1, Math.floor(((sample.atMs - start) / windowMs) * columns));
    const number = sample[value];
    if (column >= 0 && number !== null && (found[column] === null || number > found[column])) found[column] = number;
  }
  return found;
}

// Draws a curve with a gap where values are missing.
function curvePath(values, top, width, height) {
  let path = "";
  let isDown = false;
  const step = width / values.length;
  values.forEach((value, index) => {
    if (value === null) {
      isDown = false;
      return;
    }
    const point = `${((index + 0.5) * step).toFixed(1)} ${(height - 1 - (value / top) * (height - 1)).toFixed(1)}`;
    path += isDown ? `L${point}` : `M${point}h0.01`;
    isDown = true;
  });
  return path;
}

function barsPath(values, top, width, height) {
  const step = width / values.length;
  return values
    .map((value, index) => {
      if (value === null) return "";
      return `M${((index + 0.5) * step).toFixed(1)} ${height}V${(height - Math.max(1, (value / top) * height)).toFixed(1)}`;
    })
    .join("");
}

// Returns the age at the top of a chart of ages. A limit far above all ages is left out of it, so that ages can be read.
function topAge(ages, limitMs) {
  const largest = Math.max(1, ...ages.filter((age) => age !== null));
  return limitMs !== null && limitMs <= largest * 8 ? Math.max(largest, limitMs) * 1.08 : largest * 1.15;
}

// Returns the age at the top of the chart, in ms, and where the limit is, from 0 at the top to 1; null if it is above.
function drawLag(limit, curve, guest, columns, width, height) {
  const ages = columnsOf(guest.samples, "ageMs", columns);
  const limitMs = guest.data.limit_ms;
  const top = topAge(ages, limitMs);
  curve.setAttribute("d", curvePath(ages, top, width, height));
  const y = height - ((limitMs ?? Infinity) / top) * height;
  limit.setAttribute("d", y >= 0 ? `M0 ${y.toFixed(1)}H${width}` : "");
  return [top, y >= 0 ? y / height : null];
}

// Returns the pause at the top of the chart, in µs.
function drawPauses(curve, guest, columns, width, height) {
  const pauses = columnsOf(guest.samples, "pauseUs", columns);
  const top = Math.max(1000, ...pauses.filter((pause) => pause !== null)) * 1.05;
  curve.setAttribute("d", barsPath(pauses, top, width, height));
  return top;
}

function drawSparks(guest) {
  guest.needsCharts = false;
  const { lag, pauses } = guest.parts;
  const hasSamples = guest.samples.length > 0;
  lag.svg.style.visibility = pauses.svg.style.visibility = hasSamples ? "" : "hidden";
  if (!hasSamples) return;
  drawLag(lag.limit, lag.curve, guest, COLUMNS, COLUMNS, 28);
  drawPauses(pauses.curve, guest, COLUMNS, COLUMNS, 28);
}

// Only rows in sight have their charts drawn.
const visibility = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const guest = guests.get(Number(entry.target.dataset.id));
    if (guest === undefined) continue;
    guest.isVisible = entry.isIntersecting;
    if (guest.isVisible && guest.needsCharts) schedule(() => drawSparks(guest));
  }
}, { rootMargin: "200px" });

// Order and filter

const COLLATOR = new Intl.Collator("en", { numeric: true });
const lastAge = (guest) => guest.samples.at(-1)?.ageMs ?? -1;
const KEYS = {
  name: () => 0,
  attention: (guest) => guest.rank,
  protection: (guest) => guest.data.protection.text,
  age: lastAge,
  pause: (guest) => lastPause(guest) ?? -1,
  operation: (guest) => guest.data.operation?.started_us ?? -1,
};
const DESCENDING_FIRST = new Set(["attention", "age", "pause", "operation"]);

function compare(a, b) {
  const { key, descending } = state.sort;
  const [first, second] = [KEYS[key](a), KEYS[key](b)];
  const byKey = typeof first === "string" ? COLLATOR.compare(first, second) : first - second;
  if (byKey !== 0) return descending ? -byKey : byKey;
  const byName = COLLATOR.compare(a.data.name, b.data.name) || a.id - b.id;
  return key === "name" && descending ? -byName : byName;
}

// Puts a new guest where it belongs.
function insert(guest) {
  let [low, high] = [0, state.order.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (compare(state.order[middle], guest) <= 0) low = middle + 1;
    else high = middle;
  }
  const next = state.order[low]?.parts.row ?? null;
  state.order.splice(low, 0, guest);
  rows.insertBefore(guest.parts.row, next);
  visibility.observe(guest.parts.row);
}

function sortRows() {
  state.orderIsDirty = false;
  state.sortedAt = performance.now();
  const before = state.order;
  state.order = [...guests.values()].sort(compare);
  if (state.order.every((guest, index) => guest === before[index])) return;
  rows.append(...state.order.map((guest) => guest.parts.row));
}

function sortIfDue() {
  const isDue = state.orderIsDirty || state.sort.key === "age" || state.sort.key === "pause";
  if (!isDue || performance.now() - state.sortedAt < SORT_INTERVAL_MS) return;
  if (rows.matches(":hover") || rows.contains(document.activeElement) || details.open) return;
  sortRows();
}

function sortBy(key, descending) {
  state.sort = { key, descending };
  for (const head of table.querySelectorAll("th[data-sort]")) {
    if (head.dataset.sort === key) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
  byId("sort").value = key;
  sortRows();
}

function matches(guest) {
  const { data } = guest;
  if (state.search !== "" && !data.name.toLowerCase().includes(state.search)) return false;
  switch (state.view) {
    case "attention": return guest.rank > 0;
    case "protected": return isProtected(data);
    case "unprotected": return !isProtected(data);
    default: return true;
  }
}

function filterRows() {
  for (const guest of guests.values()) guest.parts.row.hidden = !matches(guest);
  showCounts();
}

function showCounts() {
  const all = [...guests.values()];
  const attention = all.filter((guest) => guest.rank > 0).length;
  const shielded = all.filter((guest) => isProtected(guest.data)).length;
  setText(byId("count-all"), String(all.length));
  setText(byId("count-attention"), String(attention));
  setText(byId("count-protected"), String(shielded));
  setText(byId("count-unprotected"), String(all.length - shielded));
  const host = byId("host").textContent;
  document.title = `${attention > 0 ? `(${attention}) ` : ""}Rekindle${host ? ` \u00B7 ${host}` : ""}`;
  const empty = byId("empty");
  const hasRows = all.some((guest) => !guest.parts.row.hidden);
  empty.hidden = hasRows || !state.isComplete;
  setText(empty, all.length === 0 ? "No guests run on this host." : "No guest matches the filter.");
}

function showSummary() {
  const { omitted, unreadable_vms: vms, unreadable_domains: domains } = state.summary;
  const notes = [];
  if (omitted > 0) notes.push(`${plural(omitted, "more guest")} not shown: the page shows at most ${guests.size}.`);
  if (vms > 0) notes.push(`Files of ${plural(vms, "VM")} cannot be read. Run rekindle status for the reasons.`);
  if (domains > 0) notes.push(`Files of ${plural(domains, "libvirt domain")} cannot be read.`);
  setText(byId("notice"), notes.join(" "));
  byId("notice").hidden = notes.length === 0;
}

// Announces guests that need attention now.
function announce() {
  if (state.news.length === 0) return;
  const named = state.news.slice(0, MAX_NEWS).map(({ data }) => {
    return `${data.name}: ${(data.state.level === "error" ? data.state : data.protection).text}`;
  });
  if (state.news.length > MAX_NEWS) named.push(`${state.news.length - MAX_NEWS} more guests need attention`);
  state.news = [];
  setText(byId("news"), named.join(". "));
}

// Details of a guest

function openDetails(guest) {
  if (guest === undefined) return;
  state.shown = guest;
  showDetails();
  details.showModal();
  byId("details-name").focus();
}

function fact(term, description) {
  return [make("dt", "", term), make("dd", "", description)];
}

function showDetails() {
  const guest = state.shown;
  if (guest === null) return;
  const { data } = guest;
  setText(byId("details-name"), data.name);
  const sentence = ({ level, text, detail }) => `${GLYPHS[level]} ${text}${detail ? `. ${detail}` : ""}`;
  const facts = [...fact("State", sentence(data.state)), ...fact("Protection", sentence(data.protection)), ...fact("Manager", data.manager)];
  if (data.qemu !== null || data.outdated !== null) {
    const age = data.outdated ? ". Older than the installed one: run rekindle replace-qemu." : "";
    facts.push(...fact("QEMU", `${data.qemu ?? "version not known"}${age}`));
  }
  if (data.every_ms !== null) facts.push(...fact("Interval", `${duration(data.every_ms * 1000)}; overdue after ${duration((data.limit_ms ?? 0) * 1000)}`));
  if (guest.number !== null) facts.push(...fact("Newest checkpoint", `#${guest.number}`));
  if (data.store_free_percent !== null) facts.push(...fact("Store", `${data.store_free_percent} % of its file system is available`));
  const list = byId("facts");
  const text = facts.map((element) => element.textContent).join("\n");
  if (list.dataset.text !== text) {
    list.dataset.text = text;
    list.replaceChildren(...facts);
  }
  showCharts(guest);
  showSteps(guest);
}

function showCharts(guest) {
  const has = guest.samples.length > 0;
  for (const id of ["lag-chart", "pause-chart"]) {
    byId(id).parentElement.hidden = !has;
    byId(id).parentElement.nextElementSibling.hidden = !has;
  }
  if (!has) {
    setText(byId("lag-text"), "This guest was not protected here.");
    setText(byId("pause-text"), "No checkpoint has stopped this guest.");
    return;
  }
  const ages = guest.samples.map((sample) => sample.ageMs).filter((age) => age !== null);
  const lagText = `Now ${duration(ages.at(-1) * 1000)}, at most ${duration(Math.max(...ages) * 1000)} in the last ${windowText()}.`;
  const pauses = guest.samples.map((sample) => sample.pauseUs).filter((pause) => pause !== null).sort((a, b) => a - b);
  const pauseText = pauses.length === 0
    ? `No checkpoint in the last ${windowText()}.`
    : `Last ${duration(lastPause(guest))}, median ${duration(pauses[pauses.length >> 1])}, longest ${duration(pauses.at(-1))} in the last ${windowText()}.`;
  setText(byId("lag-text"), lagText);
  setText(byId("pause-text"), pauseText);
  byId("lag-chart").setAttribute("aria-label", lagText);
  byId("pause-chart").setAttribute("aria-label", pauseText);
  const [topMs, limitAt] = drawLag(chart.limit, chart.lagCurve, guest, 150, 600, 140);
  setText(byId("lag-top"), duration(topMs * 1000));
  byId("lag-limit").hidden = limitAt === null;
  byId("lag-limit").style.top = `${(limitAt ?? 0) * 100}%`;
  setText(byId("pause-top"), duration(drawPauses(chart.pauseCurve, guest, 150, 600, 140)));
}

const chart = {
  lag: byId("lag-chart"),
  limit: makeSvg("path", { class: "limit" }),
  lagCurve: makeSvg("path", { class: "line" }),
  pauseCurve: makeSvg("path", { class: "bars" }),
};
chart.lag.append(chart.limit, chart.lagCurve);
byId("pause-chart").append(chart.pauseCurve);

function windowText() {
  return duration(state.maxSamples * state.intervalMs * 1000).replace(" min", " minutes");
}

function showSteps(guest) {
  const { operation } = guest.data;
  const steps = byId("steps");
  if (operation === null) {
    setText(byId("operation-text"), "No operation is recorded.");
    steps.hidden = true;
    return;
  }
  const when = dateText(new Date(operation.started_us / 1000));
  const stopped = operation.stopped_us === null ? "" : ` It stopped the guest for ${duration(operation.stopped_us)}.`;
  const omitted = operation.omitted_steps > 0 ? ` ${plural(operation.omitted_steps, "step")} not shown.` : "";
  setText(byId("operation-text"), `${operation.name}, ${when}.${stopped}${omitted}`);
  steps.hidden = operation.steps.length === 0;
  if (steps.operation === operation) return;
  steps.operation = operation;
  const end = Math.max(1, ...operation.steps.map(([, , offset, us]) => offset + us));
  const lines = operation.steps.map(([phase, name, offset, us]) => {
    const bar = make("span", isStopped(phase) ? "stops" : "");
    bar.style.left = `${Math.min(99, (offset / end) * 100)}%`;
    bar.style.width = `${(us / end) * 100}%`;
    const track = make("span", "track", bar);
    track.setAttribute("aria-hidden", "true");
    const label = isStopped(phase) ? `${phase} (stopped)` : phase;
    return make("tr", "", make("td", "", label), make("td", "", name), make("td", "number start", duration(offset)),
      make("td", "number", duration(us)), make("td", "when", track));
  });
  byId("step-rows").replaceChildren(...lines);
}

// Events are handled in small pieces, so that no frame takes long.

const work = [];
let isScheduled = false;

function schedule(...pieces) {
  for (const piece of pieces) work.push(piece);
  if (isScheduled) return;
  isScheduled = true;
  // Hidden pages have no frames.
  if (document.hidden) setTimeout(doWork, 0);
  else requestAnimationFrame(doWork);
}

function doWork() {
  isScheduled = false;
  const start = performance.now();
  let done = 0;
  while (done < work.length && (document.hidden || performance.now() - start < FRAME_BUDGET_MS)) {
    work[done]();
    done += 1;
  }
  work.splice(0, done);
  if (work.length > 0) schedule();
}

document.addEventListener("visibilitychange", () => {
  if (isScheduled) setTimeout(doWork, 0);
});

function afterSamples() {
  showCounts();
  announce();
  sortIfDue();
  if (details.open) showDetails();
}

const HANDLERS = {
  start(data) {
    schedule(() => {
      expectAll();
      state.intervalMs = data.interval_ms;
      state.maxSamples = data.max_samples;
      setText(byId("host"), data.host);
      setText(byId("version"), `Rekindle ${data.version}`);
      setText(byId("window"), windowText());
      document.querySelectorAll(".window-ago").forEach((element) => setText(element, `${windowText()} ago`));
    });
  },
  summary(data) {
    schedule(() => {
      state.summary = data;
      showSummary();
    });
  },
  guests(list) {
    schedule(...list.map((data) => () => addOrChange(data)), showCounts);
  },
  removed(ids) {
    schedule(...ids.map((id) => () => remove(guests.get(id))), showCounts);
  },
  history(list) {
    const load = ([id, number, values]) => {
      const guest = guests.get(id);
      if (guest === undefined) return;
      guest.number = number;
      let atMs = 0;
      for (let index = 0; index + 2 < values.length; index += 3) {
        atMs += values[index];
        addSample(guest, { atMs, ageMs: values[index + 1], pauseUs: values[index + 2] });
      }
      state.atMs = Math.max(state.atMs, atMs);
      showSample(guest);
      if (guest.isVisible) drawSparks(guest);
    };
    schedule(...list.map((item) => () => load(item)));
  },
  complete(atMs) {
    schedule(() => {
      forgetEarlier();
      state.atMs = atMs;
      state.isComplete = true;
      table.setAttribute("aria-busy", "false");
      for (const guest of guests.values()) showOperationTime(guest);
      showSummary();
      afterSamples();
      performance.mark("rekindle-complete");
    });
  },
  samples([atMs, ...list]) {
    const add = ([id, ageMs, pauseUs, number]) => {
      const guest = guests.get(id);
      if (guest === undefined) return;
      guest.number = number;
      addSample(guest, { atMs, ageMs, pauseUs });
      showSample(guest);
      if (guest.isVisible) drawSparks(guest);
    };
    const isNewMinute = Math.floor(atMs / 30000) !== Math.floor(state.atMs / 30000);
    schedule(() => { state.atMs = atMs; }, ...list.map((item) => () => add(item)), afterSamples);
    if (isNewMinute) schedule(...[...guests.values()].map((guest) => () => showOperationTime(guest)));
  },
};

// Connection

function showConnection(level, text) {
  const element = byId("connection");
  element.dataset.level = level;
  setText(element.firstElementChild, GLYPHS[level]);
  setText(byId("connection-text"), text);
}

function connect() {
  const source = new EventSource("/events");
  for (const [name, handle] of Object.entries(HANDLERS)) {
    source.addEventListener(name, (event) => {
      state.heardAt = performance.now();
      showConnection("ok", "Live");
      handle(JSON.parse(event.data));
    });
  }
  source.addEventListener("error", () => {
    // The browser connects again by itself, unless the server has rejected the page.
    if (source.readyState !== EventSource.CLOSED) return showLoss();
    showConnection("error", "No connection: the server does not answer, or too many pages are open. Trying again.");
    setTimeout(connect, RETRY_MS);
  });
}

function showLoss() {
  const since = state.heardAt === 0 ? "" : `, figures are ${duration((performance.now() - state.heardAt) * 1000)} old`;
  showConnection("error", `Connection lost${since}. Trying again.`);
}

setInterval(() => {
  const silentMs = performance.now() - state.heardAt;
  if (state.heardAt > 0 && silentMs > 5 * state.intervalMs && !document.hidden) showLoss();
}, 5000);

// Input

byId("tools").addEventListener("submit", (event) => event.preventDefault());
byId("tools").addEventListener("change", (event) => {
  if (event.target.name === "view") {
    state.view = event.target.value;
    filterRows();
  } else if (event.target.id === "sort") {
    sortBy(event.target.value, DESCENDING_FIRST.has(event.target.value));
  }
});
byId("search").addEventListener("input", (event) => {
  state.search = event.target.value.trim().toLowerCase();
  filterRows();
});
for (const head of table.querySelectorAll("th[data-sort]")) {
  head.firstElementChild.addEventListener("click", () => {
    const key = head.dataset.sort;
    sortBy(key, state.sort.key === key ? !state.sort.descending : DESCENDING_FIRST.has(key));
  });
}
rows.addEventListener("keydown", (event) => {
  const moves = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  if (!(event.key in moves) || !event.target.matches(".name") || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const names = state.order.filter((guest) => !guest.parts.row.hidden).map((guest) => guest.parts.name);
  const index = names.indexOf(event.target) + moves[event.key];
  names[Math.max(0, Math.min(names.length - 1, index))].focus();
});
byId("close").addEventListener("click", () => details.close());
details.addEventListener("click", (event) => {
  if (event.target === details) details.close();
});
details.addEventListener("close", () => {
  const guest = state.shown;
  state.shown = null;
  guest?.parts.name.focus();
});

connect();
performance.mark("rekindle-interactive");
