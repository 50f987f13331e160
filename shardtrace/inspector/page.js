// The tabs: passes with their lines, modules and numbers. Needs lines.js and timeline.js.

// ---- the list of lines: only visible lines are in the document ----
const view = $("#view"), rows = $("#rows");
const state = { stage: -1, mode: "code", dels: false, entries: [], places: [], chosen: -1, part: -1, hovered: -1, hits: new Set(), order: [] };
const current = () => stages[state.stage];

function arrange() {
  const stage = current();
  const listed = state.mode === "code" ? withoutInputs(stage.listing).filter(isListed) : folded(stage.all);
  state.entries = listed.flatMap(withParts);
  state.places = [];
  state.entries.forEach((entry, i) => { if (entry.at >= 0) state.places[entry.at] = i; });
  rows.style.height = `${state.entries.length * ROW}px`;
  draw();
}
const isListed = (entry) => state.dels || entry.fold || !isDeletion(entry.line);
function withoutInputs(listing) { // a hundred parameters would hide the first lines of compute
  const inputs = listing.findIndex((row) => !plainPieces[data.lines[row.line][0]][0].startsWith("# "));
  if (inputs < 6 || listing[0].shown) return listing;
  return [{ fold: listing[0], what: "inputs", count: inputs }, ...listing.slice(inputs)];
}
function withParts(entry) { // of a line that was opened
  if (entry.fold || !entry.opened) return [entry];
  const parts = partsOf(entry.line).map((part, k) => ({ line: part, mark: KEPT, at: -1, part: k, of: entry }));
  return [entry, ...parts.filter(isListed)];
}
function toggle(at) {
  const entry = current().listing[at];
  if (!partsOf(entry.line).length) return;
  entry.opened = !entry.opened;
  state.part = -1;
  arrange();
  describe(at);
}
function folded(all) {
  const entries = [];
  for (let a = 0; a < all.length;) {
    let b = a;
    while (b < all.length && all[b].mark === KEPT) b++;
    const before = a ? CONTEXT : 0, after = b < all.length ? CONTEXT : 0;
    if (b - a > before + after + 1 && !all[a].shown) {
      entries.push(...all.slice(a, a + before), { fold: all[a], what: "unchanged lines", count: b - a - before - after }, ...all.slice(b - after, b));
    } else entries.push(...all.slice(a, b));
    if (b < all.length) entries.push(all[b++]);
    a = b;
  }
  return entries;
}
function draw() {
  if (state.stage < 0) return;
  const phase = phaseOf(state.stage);
  const focus = state.hovered >= 0 ? state.hovered : state.chosen;
  const near = focus >= 0 ? relations(current(), focus) : { producers: [], consumers: [], freed: [] };
  const css = new Map([...near.producers.map((p) => [p, "producer"]), ...[...near.consumers, ...near.freed].map((c) => [c, "consumer"])]);
  const from = Math.max(0, Math.floor(view.scrollTop / ROW) - 10);
  const to = Math.min(state.entries.length, Math.ceil((view.scrollTop + view.clientHeight) / ROW) + 10);
  let code = "";
  for (let i = from; i < to; i++) code += drawRow(state.entries[i], i, phase, css);
  rows.innerHTML = code;
}
function drawRow(entry, i, phase, css) {
  const top = `style="top:${i * ROW}px"`;
  if (entry.fold) return `<div class="line fold" data-fold="${i}" ${top}><span class="no">⋯</span><span class="sign"></span>${entry.count.toLocaleString("en")} ${entry.what}</div>`;
  if (entry.of) {
    const chosen = entry.of.at === state.chosen && entry.part === state.part ? " chosen" : "";
    return `<div class="line part${chosen}" role="option" data-part="${entry.part}" data-of="${entry.of.at}" ${top}><span class="no">${entry.part}</span><span class="sign"></span>${html(entry.line)}</div>`;
  }
  const plain = text(entry.line);
  const opens = entry.at >= 0 && partsOf(entry.line).length ? `<button class="opens" data-open="${entry.at}" aria-expanded="${Boolean(entry.opened)}" aria-label="its lines"></button>` : "";
  const kind = /\b(wait_)?(all_gather|all_to_all|broadcast|reduce_scatter|reduce|all_reduce|synchronize)(_parts|_heads|_positions)?\(/.exec(plain);
  const classes = ["line", css.get(entry.at) ?? ""];
  if (state.mode === "diff") classes.push(`m${entry.mark}`);
  else if (kind) classes.push(kind[2].includes("reduce") ? "reduce" : "gather", kind[1] ? "wait" : "");
  if (entry.at >= 0 && entry.at === state.chosen) classes.push("chosen");
  if (state.hits.has(entry.at)) classes.push("hit");
  const sign = state.mode === "diff" ? ["", "+", "↕", "−"][entry.mark] : "";
  const why = phase?.why[entry.at] && entry.at >= 0 ? `<span class="why">${phase.why[entry.at].replace(/^.*? here: /, "")}</span>` : "";
  return `<div class="${classes.filter(Boolean).join(" ")}" role="option" data-line="${entry.at}" ${top}><span class="no">${entry.at >= 0 ? entry.at : ""}</span><span class="sign">${sign}</span>${opens}${html(entry.line)}${why}</div>`;
}

// ---- the details of a line ----
const details = $("#details");
const HINT = `<p class="hint">Point at a line, or click it, to see its producers and consumers, its size, its module, its source, and the reason for its position.</p>`;
function link(stage, at, css) {
  return `<button class="link ${css}" data-go="${at}"><small>${at}</small>${html(stage.listing[at].line)}</button>`;
}
function list(title, stage, places, css) {
  if (!places.length) return "";
  const more = places.length > 12 ? `<p class="hint">and ${places.length - 12} more</p>` : "";
  return `<h3>${title}</h3>${places.slice(0, 12).map((at) => link(stage, at, css)).join("")}${more}`;
}
function typesOf(line) {
  const types = data.templates[data.lines[line][0]][2].filter((t) => t >= 0).map((t) => data.types[t]);
  const facts = types.slice(0, 6).map(([kind, bytes], k) => [k ? "" : "result", `<code>${kind}</code> ${size(bytes)}`]);
  if (types.length > 6) facts.push(["", `and ${types.length - 6} more, ${size(types.reduce((sum, t) => sum + t[1], 0))} in all`]);
  return facts;
}
function sourceOf(line) {
  const source = data.sources[data.lines[line][1]];
  return source ? [["source", `<code>${source[2]}</code><br><small>${source[0]}:${source[1]}</small>`]] : [];
}
const table = (facts) => `<dl>${facts.map(([k, v]) => `<dt>${k}</dt><dd>${v}</dd>`).join("")}</dl>`;
const passesOf = (f) => (f.stage < 0 ? f.name : `<button class="link stagelink" data-stage="${f.stage}">${f.name}</button>`);
function describePart(at, k) { // a line of the function, or of the fusion, in line `at`
  const { line } = current().listing[at], phase = phaseOf(state.stage), f = calledBy(line), part = partsOf(line)[k];
  const facts = typesOf(part);
  const module = f ? moduleIn(f, k, moduleOf(line)) : moduleOf(part);
  if (module !== undefined) facts.push(["module", module || "the model itself"]);
  facts.push(...sourceOf(part));
  if (f && phase) {
    const share = data.times === "measured" ? "its predicted share of the measured call" : "predicted";
    facts.push(["time", `${duration(f.shares[k] * secondsAt(phase, at))}, ${share}`]);
  }
  details.innerHTML = `<code class="code-line">${html(part)}</code>${table(facts)}` +
    (f ? `<h3>line ${k} of the function</h3>${passesOf(f)}` : "") + `<h3>part of</h3>${link(current(), at, "")}`;
}
function describe(at) {
  if (at < 0) { details.innerHTML = HINT; return; }
  const stage = current(), phase = phaseOf(state.stage), { line } = stage.listing[at];
  const near = relations(stage, at), facts = typesOf(line), f = calledBy(line);
  const module = moduleOf(line);
  if (module !== undefined) facts.push(["module", module || "the model itself"]);
  if (phase?.buckets[at]) facts.push(["bucket", phase.buckets[at]]);
  facts.push(...sourceOf(line));
  if (phase) {
    facts.push(["time", `${duration(secondsAt(phase, at))}, starts at ${duration(phase.time[at])}, ${data.times}`]);
    const row = memoryAt(phase, at);
    if (row) facts.push(["memory", `${size(row.slice(1).reduce((a, b) => a + b))} after the line`]);
    if (near.freed.length) facts.push(["freed", `at line ${near.freed.join(", ")}`]);
  }
  const why = phase?.why[at] ? `<p class="why">${phase.why[at]}</p>` : "";
  const parts = f ? "" : partsOf(line).map((part) => `<span class="link">${html(part)}</span>`).join("");
  details.innerHTML =
    `<code class="code-line">${html(line)}</code>${why}${table(facts)}` +
    (f ? `<h3>calls, with its passes</h3>${passesOf(f)}` : "") +
    list("made from", stage, near.producers, "producer") + list("used by", stage, near.consumers, "consumer") +
    (parts ? `<h3>consists of</h3>${parts}` : "");
}

// ---- moving about ----
function show(k, { mode = state.mode, at = -1 } = {}) {
  if (!stages[k]) return;
  const changed = k !== state.stage;
  Object.assign(state, { stage: k, mode, hovered: -1 });
  const stage = open(stages[k]);
  for (const e of $$(".stage")) {
    const selected = Number(e.dataset.stage) === k;
    e.setAttribute("aria-selected", selected);
    if (selected) e.closest("details")?.setAttribute("open", "");
    if (selected && changed) nearest(e, $("#stages"));
  }
  for (const b of $$("[data-mode]")) b.setAttribute("aria-pressed", b.dataset.mode === mode);
  $("#dels").setAttribute("aria-pressed", state.dels);
  $("#stage").innerHTML = `${stage.name} <small>${stage.phase}</small>`;
  if (changed) { state.chosen = -1; view.scrollTop = 0; }
  search(false);
  arrange();
  choose(at >= 0 ? at : state.chosen, at >= 0);
}
function nearest(e, box) { // scrolls only the box, not the page
  const inside = e.getBoundingClientRect(), around = box.getBoundingClientRect();
  box.scrollTop += Math.min(0, inside.top - around.top) + Math.max(0, inside.bottom - around.bottom);
}
function choose(at, scroll = true) {
  state.chosen = at;
  state.part = -1;
  if (at >= 0 && scroll) {
    const entry = state.places[at];
    if (entry === undefined) { // in a fold, or a del
      current().listing[0].shown = true;
      state.dels ||= isDeletion(current().listing[at].line);
      return show(state.stage, { mode: "code", at });
    }
    const top = entry * ROW;
    if (top < view.scrollTop + ROW || top > view.scrollTop + view.clientHeight - 2 * ROW) view.scrollTop = top - view.clientHeight / 3;
  }
  describe(at);
  draw();
  const phase = phaseOf(state.stage);
  place(fixed, phase && at >= 0 ? phase.time[at] : -1);
}
function goTo(where) { // "forward:12", or "forward:12:3" for a line of the function that line 12 calls
  const [name, at, part] = where.split(":");
  const phase = data.phases.find((p) => p.name === name);
  tab("passes");
  if (part !== undefined) open(stages[phase.stage]).listing[at].opened = true;
  show(phase.stage, { mode: "code", at: Number(at) });
  if (part !== undefined) choosePart(Number(part));
}
function choosePart(part) { // of the chosen line
  state.part = part;
  const top = state.entries.findIndex((entry) => entry.of?.at === state.chosen && entry.part === part) * ROW;
  if (top > view.scrollTop + view.clientHeight - 2 * ROW) view.scrollTop = top - view.clientHeight / 3;
  describeChosen();
  draw();
}
function step(by) {
  const order = state.entries.filter((entry) => entry.at >= 0).map((entry) => entry.at);
  const k = order.indexOf(state.chosen);
  const next = order[Math.max(0, Math.min(order.length - 1, k < 0 ? 0 : k + by))];
  if (next !== undefined) choose(next);
}
function tab(name) {
  for (const t of $$("[role=tab]")) t.setAttribute("aria-selected", t.id === `tab-${name}`);
  for (const p of $$(".panel")) p.classList.toggle("open", p.id === name);
  if (name === "passes") draw();
}
function neighbour(by) { // the next visible stage of the list
  const shown = $$(".stage").filter((e) => e.offsetParent).map((e) => Number(e.dataset.stage));
  const k = shown.indexOf(state.stage);
  if (shown[k + by] !== undefined) show(shown[k + by]);
}

// ---- search ----
const box = $("#search"), output = $("#hits");
function search(jump) {
  if (!current()) return;
  const wanted = box.value.trim().toLowerCase();
  const inside = new Map(); // a function is searched once
  const fits = (line) => text(line).toLowerCase().includes(wanted);
  const called = (f) => f && (inside.get(f) ?? inside.set(f, f.lines.some(fits)).get(f));
  state.order = wanted ? current().listing.filter(({ line }) => fits(line) || called(calledBy(line))).map((row) => row.at) : [];
  state.hits = new Set(state.order);
  output.textContent = wanted ? `${state.order.length} found` : "";
  if (jump && state.order.length) find(1, true); else if (jump) draw();
}
function find(by, stay = false) {
  if (!state.order.length) return;
  const here = state.order.findIndex((at) => (stay ? at >= state.chosen : at > state.chosen));
  const k = by > 0 ? (here < 0 ? 0 : here) : (state.order.filter((at) => at < state.chosen).length || state.order.length) - 1;
  choose(state.order[k]);
  output.textContent = `${k + 1} of ${state.order.length}`;
}

// ---- events ----
view.addEventListener("scroll", draw);
addEventListener("resize", draw);
view.addEventListener("pointerover", (event) => {
  const { line = -1, of = -1, part = -1 } = event.target.closest("[data-line],[data-part]")?.dataset ?? {};
  const [at, over] = [Number(line), Number(part)];
  if (over >= 0) describePart(Number(of), over);
  else if (at !== state.hovered || state.over >= 0) at >= 0 ? describe(at) : describeChosen();
  state.over = over;
  if (at === state.hovered) return;
  state.hovered = at;
  draw();
});
const describeChosen = () => (state.part >= 0 ? describePart(state.chosen, state.part) : describe(state.chosen));
view.addEventListener("pointerleave", () => { state.hovered = -1; describeChosen(); draw(); });
document.addEventListener("click", (event) => {
  const on = (selector) => event.target.closest(selector);
  let e;
  if ((e = on("[role=tab]"))) tab(e.id.slice(4));
  else if ((e = on("[data-open]"))) toggle(Number(e.dataset.open));
  else if ((e = on("[data-part]"))) { choose(Number(e.dataset.of), false); choosePart(Number(e.dataset.part)); }
  else if ((e = on("[data-stage]"))) show(Number(e.dataset.stage));
  else if ((e = on("[data-mode]"))) show(state.stage, { mode: e.dataset.mode });
  else if ((e = on("[data-zoom]"))) setZoom(Number(e.dataset.zoom) ? zoom * Number(e.dataset.zoom) : 1);
  else if ((e = on("[data-fold]"))) { state.entries[Number(e.dataset.fold)].fold.shown = true; arrange(); }
  else if ((e = on("[data-go]"))) choose(Number(e.dataset.go));
  else if ((e = on("[data-line]"))) choose(Number(e.dataset.line), false);
  else if ((e = on("#dels"))) { state.dels = !state.dels; show(state.stage, { at: state.chosen }); }
  else if ((e = on("#keys"))) $("#help").showModal();
  else if ((e = on("a[data-at]"))) { event.preventDefault(); goTo(e.dataset.at); }
});
box.addEventListener("input", () => search(true));
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
  const inside = (e) => e?.contains(document.activeElement);
  if (document.activeElement === box) {
    if (event.key === "Enter") find(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { box.value = ""; search(false); draw(); view.focus(); }
    return;
  }
  const chosen = state.chosen >= 0 ? relations(current(), state.chosen) : null;
  const keys = {
    "/": () => box.focus(), d: () => show(state.stage, { mode: state.mode === "code" ? "diff" : "code" }),
    o: () => state.chosen >= 0 && toggle(state.chosen),
    "[": () => neighbour(-1), "]": () => neighbour(1), "?": () => $("#help").showModal(),
    1: () => tab("passes"), 2: () => tab("modules"), 3: () => tab("numbers"),
    p: () => chosen?.producers.length && choose(chosen.producers[0]), c: () => chosen?.consumers.length && choose(chosen.consumers[0]),
    "+": () => setZoom(zoom * 2), "=": () => setZoom(zoom * 2), "-": () => setZoom(zoom / 2), 0: () => setZoom(1), Escape: () => choose(-1),
  };
  if (inside($("#stages"))) Object.assign(keys, { ArrowUp: () => neighbour(-1), ArrowDown: () => neighbour(1) });
  if (inside(view)) Object.assign(keys, { ArrowUp: () => step(-1), ArrowDown: () => step(1), PageUp: () => step(-25), PageDown: () => step(25), Home: () => step(-1e9), End: () => step(1e9) });
  if (inside(section)) Object.assign(keys, { ArrowLeft: () => onTimeline(-1), ArrowRight: () => onTimeline(1) });
  if (inside($("nav"))) Object.assign(keys, { ArrowLeft: () => sideways(-1), ArrowRight: () => sideways(1) });
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
function onTimeline(by) {
  if (!phaseOf(state.stage)) show(data.phases[0].stage);
  step(by);
  if (!fixed.hidden) fixed.scrollIntoView({ block: "nearest", inline: "nearest" });
}
function sideways(by) {
  const names = ["passes", "modules", "numbers"];
  const k = names.findIndex((name) => $(`#tab-${name}`).getAttribute("aria-selected") === "true");
  tab(names[(k + by + 3) % 3]);
  $(`#tab-${names[(k + by + 3) % 3]}`).focus();
}
$("#help form button").addEventListener("click", () => $("#help").close());

describe(-1);
const highest = $(".peak")?.dataset.at; // the line that needs the most memory is the first question
if (highest) goTo(highest); else if (stages.length) show(0);
