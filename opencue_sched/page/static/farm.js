"use strict";
// The farm page: asks for the farm every two seconds and writes what changed. Names and reasons come from people, so
// they are set as text and never as HTML.

const EVERY_MS = 2000;
const WAIT_MS = 20000;
const $ = (selector, of = document) => of.querySelector(selector);
let farm = null;
let job = null; // the id of the one whose explanation is open

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  node.className = className;
  node.append(...children);
  return node;
}

function put(node, text, className = node.className) {
  if (node.textContent !== String(text)) node.textContent = text;
  if (node.className !== className) node.className = className;
}

// Have parent show one node for each item, in this order: those it has stay, and keep the focus.
function fill(parent, items, key, create, update) {
  const had = parent.shown ?? new Map();
  parent.shown = new Map(items.map((item) => [key(item), had.get(key(item)) ?? create(item)]));
  for (const [name, node] of had) if (!parent.shown.has(name)) node.remove();
  let next = parent.firstChild;
  for (const item of items) {
    const node = parent.shown.get(key(item));
    if (node === next) next = next.nextSibling;
    else parent.insertBefore(node, next);
    update(node, item);
  }
}

const sides = (left = "span") => make("p", "sides", make(left), make("span", "note"));
const bar = (...parts) => make("div", "bar", ...parts.map((name) => make("i", name)));

function draw(bar, of, ...parts) {
  parts.forEach((part, index) => {
    const { style, className } = bar.children[index];
    style[className === "mark" ? "left" : "width"] = `${of > 0 ? Math.min(100, (100 * part) / of) : 0}%`;
  });
}

// A line with a bar for each [name, text, of, busy], and of subscriptions [..., over, mark].
function bars(parent, rows) {
  const create = ([, , , ...parts]) => make("div", "use", sides(), bar(...["busy", "over", "mark"].slice(0, parts.length)));
  fill(parent, rows, (it) => it[0], create, (node, [name, text, of, ...parts]) => {
    put(node.firstChild.firstChild, name);
    put(node.firstChild.lastChild, text);
    draw(node.lastChild, of, ...parts);
  });
}

const { format: number } = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const percent = (part) => `${Math.round(100 * part)} %`;
const words = (code) => code.toLowerCase().replaceAll("_", " ");
const clock = () => new Date(farm.at * 1000).toLocaleTimeString("en-GB");
const list = (...parts) => parts.filter(Boolean).join(", ");
const sum = (field) => farm.allocations.reduce((total, it) => total + it[field], 0);

// Commands stand between backticks.
const sentence = (text) => text.split("`").map((part, index) => (index % 2 ? make("code", "", part) : part));

function showTotals() {
  const { leader, workers } = farm.fleet;
  const totals = [
    ["Cores booked", `${number(sum("booked"))} of ${number(sum("cores") - sum("down"))}`],
    ["Running", number(farm.running)],
    ["Waiting", number(farm.waiting)],
    ["Dead", number(farm.dead), farm.dead ? "bad" : ""],
    ["Hosts up", `${number(sum("hosts") - sum("hosts_down"))} of ${number(sum("hosts"))}`, sum("hosts_down") ? "warn" : ""],
    ["Bookings", `${number(farm.bookings_per_second)} /s`],
    ["Workers", leader.fence === null ? `${workers.length}, no leader` : workers.length, leader.fence === null || !workers.length ? "bad" : ""],
  ];
  const create = (it) => make("div", "", make("dt", "", it[0]), make("dd"));
  fill($("#totals"), totals, (it) => it[0], create, (node, it) => put(node.lastChild, it[1], it[2]));
  put($("#read"), clock());
}

function newJob(it) {
  const frames = make("td", "", bar("done", "busy", "dead"), make("p", "note"));
  const numbers = ["Priority", "Cores", "Waits"].map((word) => {
    const cell = make("td", "number");
    cell.dataset.word = word;
    return cell;
  });
  const node = make("tr", "", make("td", "", make("button", "job", it.name)), frames, ...numbers, make("td", "", make("p", "why")));
  node.addEventListener("click", () => openJob(it.id, it.name));
  return node;
}

function showJob(node, it) {
  const [, frames, priority, cores, waits, why] = node.children;
  const others = ["running", "dead"].map((state) => it[state] && `${number(it[state])} ${state}`);
  draw(frames.firstChild, it.frames, it.done, it.running, it.dead);
  put(frames.lastChild, list(`${number(it.done)} of ${number(it.frames)}`, ...others));
  put(priority, it.priority);
  put(cores, it.cores ? number(it.cores) : "");
  put(waits, it.waiting_text);
  const look = it.trouble ? "bad" : it.paused ? "warn" : it.why === "running" ? "note" : "";
  put(why.firstChild, reason(it), `why ${look}`);
}

const reason = (it) => it.why_text.replaceAll("`", "");

function showJobs() {
  const wanted = $("#filter").value.trim().toLowerCase().split(/\s+/);
  const text = (it) => [it.show, it.name, it.user, reason(it)].join(" ").toLowerCase();
  const shown = farm.jobs.filter((it) => wanted.every((word) => text(it).includes(word)));
  const all = farm.jobs_total > farm.jobs.length ? `the ${farm.jobs.length} of ${number(farm.jobs_total)} that wait longest` : shown.length;
  put($("#jobs-note"), shown.length < farm.jobs.length ? `${shown.length} of ${farm.jobs.length}` : all);
  fill($("#jobs tbody"), shown, (it) => it.id, newJob, showJob);
}

function showCell(cell, it) {
  cell.style.setProperty("--use", `${it.look === "down" || !it.cores ? 0 : Math.round((100 * it.booked) / it.cores)}%`);
  put(cell, "", `cell ${it.look}`);
  cell.title = it.words;
}

function showHosts() {
  const total = sum("hosts");
  put($("#hosts-note"), total > farm.grid.length ? `the first ${number(farm.grid.length)} of ${number(total)}` : "");
  $("#breaking").replaceChildren(...farm.breaking_hosts.map((it) => make("li", "bad", it.words)));
  $("#hosts").className = farm.grid.length > 120 ? "many" : "";
  const create = () => make("div", "part", sides(), make("div", "cells"));
  fill($("#hosts"), farm.allocations.filter((it) => it.hosts), (it) => it.name, create, (node, it) => {
    const apart = [it.hosts_locked && `${it.hosts_locked} locked`, it.hosts_down && `${it.hosts_down} not up`];
    put(node.firstChild.firstChild, it.name);
    put(node.firstChild.lastChild, list(`${number(it.booked)} of ${number(it.cores - it.down)} cores`, count(it.hosts, "host"), ...apart));
    fill(node.lastChild, farm.grid.filter((host) => host.allocation === it.name), (host) => host.name, () => make("i"), showCell);
  });
}

function subscription(it) {
  const parts = it.due === null || it.share === null ? "" : `has ${percent(it.share)}, due ${percent(it.due)}`;
  const text = list(`${number(it.used)} of ${number(it.size)} (${number(it.burst)})`, parts);
  const most = Math.max(it.burst, it.size, it.used);
  return [it.allocation, text, most, Math.min(it.used, it.size), Math.max(0, it.used - it.size), it.size];
}

function showShows() {
  fill($("#shows"), farm.shows, (it) => it.name, () => make("div", "part", sides("strong"), make("div", "note")), (node, it) => {
    const frames = [`${number(it.running)} running`, `${number(it.waiting)} waiting`];
    put(node.firstChild.firstChild, it.name);
    put(node.firstChild.lastChild, list(it.off, count(it.jobs, "job"), ...frames), it.off ? "note warn" : "note");
    bars(node.lastChild, it.subscriptions.map(subscription));
  });
}

function limit(it) {
  const reported = it.settled === null ? "" : `${number(it.settled)} reported ${count(Math.round(it.report_age), "second")} ago`;
  const text = list(`${number(it.used)} of ${count(it.most, it.counts.slice(0, -1))}`, reported, it.open && `open: ${it.open}`);
  return [it.name, text, Math.max(it.most, it.used, 1), Math.min(it.used, it.most), Math.max(0, it.used - it.most)];
}

function showLimits() {
  $("#licences").hidden = !farm.limits.length;
  bars($("#limits"), farm.limits.map(limit));
}

function showFleet() {
  const found = Object.entries(farm.waiting_by_verdict).filter((it) => it[1]);
  if (farm.waiting_paused) found.push(["paused", farm.waiting_paused]);
  found.sort((one, other) => other[1] - one[1]);
  const age = farm.waiting_counted_at === null ? "" : `counted ${count(Math.round(farm.at - farm.waiting_counted_at), "second")} ago`;
  put($("#verdicts-note"), found.length ? age : "");
  bars($("#verdicts"), found.map(([verdict, frames]) => [words(verdict), number(frames), found[0][1], frames]));
  const { leader, workers } = farm.fleet;
  put($("#leader"), leader.words, leader.fence === null ? "bad" : "");
  const rows = workers.map((it) => [it.instance, `${it.state}, ${it.in_flight} of ${it.capacity} in hand`, it.capacity, it.in_flight]);
  bars($("#workers"), rows.length ? rows : [["No worker is alive.", "", 0, 0]]);
}

// What frames died of, the end of the log of one of them, and a link to more of that log.
function showDeaths({ deaths, note }) {
  $("#deaths").replaceChildren(...deaths.map((it) => {
    const who = it.frames > 1 ? `${it.layer}: ${count(it.frames, "frame")} dead, at last ${it.frame}` : `${it.layer}: ${it.frame} is dead`;
    const text = make("p", "bad", `${who}${it.host ? ` on ${it.host}` : ""}, exit status ${it.exit_status}: ${it.meaning}`);
    if (it.lines === null) return make("li", "", text, make("p", "note", `log ${it.log} (not visible here)`));
    const link = make("a", "note", `log ${it.log}`);
    link.href = `farm/log?frame=${encodeURIComponent(it.frame_id)}`;
    link.target = "_blank";
    return make("li", "", text, link, make("pre", "", it.lines.join("\n")));
  }), ...(note ? [make("li", "note", note)] : []));
}

async function explain() {
  const asked = job;
  const told = await ask(`farm/data?job=${encodeURIComponent(asked)}`).catch((error) => error);
  if (asked !== job) return; // closed, or another was opened, meanwhile
  const seen = farm.jobs.find((it) => it.id === job);
  put($("#job-note"), told.message ?? (seen ? list(seen.show, seen.user, `priority ${seen.priority}`) : words(told.state)));
  if (told.deaths) showDeaths(told);
  if (told.lines) $("#explained").replaceChildren(...told.lines.map((line) => make("li", "", ...sentence(line))));
}

function openJob(id, name) {
  job = id;
  put($("#job-title"), name);
  put($("#job-note"), "…");
  $("#explained").replaceChildren();
  $("#deaths").replaceChildren();
  $("#job").showModal();
  explain();
}

async function ask(address) {
  const here = location.origin + location.pathname; // without a password, with which nothing may be fetched
  const how = { redirect: "manual", cache: "no-store", signal: AbortSignal.timeout(WAIT_MS) };
  const answer = await fetch(new URL(address, here), how).catch(() => null);
  if (answer === null) throw new Error("Flower does not answer, or not in time.");
  if (answer.type === "opaqueredirect" || answer.status === 401) throw new Error("Flower asks who you are again: reload this page.");
  const told = await answer.json().catch(() => ({ error: `Flower answers with status ${answer.status}, and its log says why` }));
  if (!answer.ok) throw new Error(`${told.error}.`);
  return told;
}

async function watch() {
  let problem = "";
  try {
    farm = await ask("farm/data");
    for (const part of [showTotals, showJobs, showHosts, showShows, showLimits, showFleet]) part();
    if (job !== null) await explain();
  } catch (error) {
    problem = `${error.message} ${farm ? `What you see is of ${clock()}. ` : ""}The page tries again by itself.`;
  }
  $("#banner").hidden = !problem;
  put($("#banner"), problem);
  document.body.className = problem ? "stale" : "";
  setTimeout(watch, EVERY_MS);
}

$("#filter").addEventListener("input", () => farm && showJobs());
$("#job").addEventListener("close", () => { job = null; });
watch();
