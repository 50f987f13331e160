// `data` (written by data.py) refers to lines, names, types and modules by index. Its strings are escaped HTML, and the
// page inserts no other text. Nothing is escaped here.
const $ = (selector, from = document) => from.querySelector(selector);
const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
const packed = Uint8Array.from(atob($("#data").textContent), (c) => c.charCodeAt(0));
const data = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
const ROW = 20, KEPT = 0, REMOVED = 3, CONTEXT = 3; // pixels; marks; lines around a change
document.documentElement.classList.add("js");

// ---- units ----
const trim = (x) => Number(x.toPrecision(3)).toString();
function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (bytes >= 1024 && k < 4) { bytes /= 1024; k++; }
  return `${trim(bytes)} ${units[k]}`;
}
function duration(seconds) {
  const [scale, unit] = seconds >= 1 ? [1, "s"] : seconds >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return seconds ? `${trim(seconds / scale)} ${unit}` : "0 s";
}

// ---- lines ----
const resultsOf = (line) => data.lines[line].slice(2, 2 + data.templates[data.lines[line][0]][1]);
const argumentsOf = (line) => data.lines[line].slice(2 + data.templates[data.lines[line][0]][1]);
function html(line) {
  const [template, , ...names] = data.lines[line];
  const pieces = data.templates[template][0];
  return names.reduce((code, n, i) => `${code}<b data-n="${n}">${data.names[n]}</b>${pieces[i + 1]}`, pieces[0]);
}
const strip = (code) => { const e = document.createElement("template"); e.innerHTML = code; return e.content.textContent; };
const plainPieces = data.templates.map(([pieces]) => pieces.map(strip));
function text(line) {
  const [template, , ...names] = data.lines[line];
  const pieces = plainPieces[template];
  return names.reduce((code, n, i) => code + data.names[n] + pieces[i + 1], pieces[0]);
}
const moduleOf = (line) => {
  const known = resultsOf(line).map((n) => data.owners[n]).find((m) => m >= 0);
  return known === undefined ? undefined : data.modules[known];
};

// ---- functions of blocks: a line that calls one consists of its lines ----
for (const f of data.functions) {
  const total = f.seconds.reduce((a, b) => a + b, 0) || 1;
  let now = 0;
  f.shares = f.seconds.map((s) => s / total);
  f.starts = f.shares.map((s) => (now += s) - s);
}
const calledBy = (line) => data.functions[data.calls[line]];
const partsOf = (line) => calledBy(line)?.lines ?? data.parts[line] ?? [];
function moduleIn(f, k, called) { // the module of its line k in a call of the module `called`
  const own = data.modules[f.modules[k]], first = data.modules[f.module];
  if (own === undefined || called === undefined) return undefined;
  if (own === first) return called;
  return own.startsWith(`${first}.`) ? called + own.slice(first.length) : own;
}

// ---- phases: executed traces on one clock ----
for (const phase of data.phases) {
  let now = 0;
  phase.time = phase.starts.map((step) => (now += step) / 1e9);
}
const phaseOf = (stage) => data.phases.find((phase) => phase.stage === stage);
const end = data.phases.length ? data.phases.at(-1).time.at(-1) : 0;
function last(list, fits) { // the last index of a sorted list whose value fits
  let a = 0, b = list.length;
  while (a < b) { const m = (a + b) >> 1; if (fits(list[m])) a = m + 1; else b = m; }
  return a - 1;
}
const secondsAt = (phase, at) => phase.time[at + 1] - phase.time[at];
const memoryAt = (phase, at) => phase.memory[last(phase.memory, (row) => row[0] <= at)];

// ---- a stage: its rows, and the producer and consumers of each name ----
const stages = data.stages.map((stage) => ({ ...stage }));
function open(stage) {
  if (stage.all) return stage;
  let at = 0;
  stage.all = stage.rows.map((row) => {
    const mark = row % 4;
    return { line: (row - mark) / 4, mark, at: mark === REMOVED ? -1 : at++ };
  });
  stage.listing = stage.all.filter((row) => row.mark !== REMOVED);
  stage.made = new Map();
  stage.used = new Map();
  for (const { line, at } of stage.listing) {
    for (const n of resultsOf(line)) if (!stage.made.has(n)) stage.made.set(n, at);
    for (const n of argumentsOf(line)) stage.used.has(n) ? stage.used.get(n).push(at) : stage.used.set(n, [at]);
  }
  return stage;
}
const isDeletion = (line) => plainPieces[data.lines[line][0]][0].startsWith("del ");
function relations(stage, at) {
  const line = stage.listing[at].line;
  const producers = new Set(argumentsOf(line).map((n) => stage.made.get(n)).filter((p) => p !== undefined && p < at));
  const users = new Set(resultsOf(line).flatMap((n) => stage.used.get(n) ?? []).filter((u) => u > at));
  const [consumers, freed] = [[], []];
  for (const u of users) (isDeletion(stage.listing[u].line) ? freed : consumers).push(u);
  const sorted = (places) => [...places].sort((a, b) => a - b);
  return { producers: sorted(producers), consumers: sorted(consumers), freed: sorted(freed) };
}
