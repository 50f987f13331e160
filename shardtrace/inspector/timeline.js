// The timeline: its pointer, its zoom, and the hint beside the pointer. Needs lines.js.
const section = $("#timeline"), scroller = $(".scroller"), track = $(".track");
const mark = (css) => { const e = document.createElement("div"); e.className = css; e.hidden = true; track?.append(e); return e; };
const pointer = mark("cursor"), fixed = mark("cursor fixed");
const tip = document.createElement("div");
let zoom = 1;
function place(cursor, seconds) {
  cursor.hidden = seconds < 0 || !end;
  cursor.style.left = `${(100 * seconds) / end}%`;
}
function setZoom(to, at = 0.5) { // `at`: the point of the visible part that stays in place, from 0 to 1
  const before = (scroller.scrollLeft + at * scroller.clientWidth) / track.clientWidth;
  zoom = Math.max(1, Math.min(400, to));
  track.style.width = `${100 * zoom}%`;
  scroller.scrollLeft = before * track.clientWidth - at * scroller.clientWidth;
  drawTicks();
}
function drawTicks() {
  const least = end / zoom / Math.max(2, scroller.clientWidth / 90), power = 10 ** Math.floor(Math.log10(least));
  const tick = power * [1, 2, 5, 10].find((f) => f * power >= least);
  const from = zoom > 40 ? (end * scroller.scrollLeft) / track.clientWidth : 0; // far in: only the ticks nearby
  let ticks = "";
  for (let k = Math.max(0, Math.floor(from / tick) - 20); k * tick < end && k * tick < from + 60 * 8 * tick; k++)
    ticks += `<span style="left:${(100 * k * tick) / end}%">${duration(k * tick)}</span>`;
  $(".axis", track).innerHTML = ticks;
}
function under(event) {
  const seconds = ((event.clientX - track.getBoundingClientRect().left) / track.clientWidth) * end;
  const phase = data.phases.findLast((p) => p.time[0] <= seconds) ?? data.phases[0];
  const at = Math.max(0, Math.min(last(phase.time, (t) => t <= seconds), phase.time.length - 2));
  return { seconds, phase, at };
}
function hint(event) {
  const { seconds, phase, at } = under(event);
  place(pointer, seconds);
  const bar = event.target.closest("rect[data-title]")?.dataset.title;
  const { line } = open(stages[phase.stage]).listing[at], row = memoryAt(phase, at), f = calledBy(line);
  const k = f ? last(f.starts, (share) => phase.time[at] + share * secondsAt(phase, at) <= seconds) : -1;
  const module = k >= 0 ? moduleIn(f, k, moduleOf(line)) : moduleOf(line);
  const held = row.slice(1).map((bytes, k) => [bytes, data.kinds[k]]).filter(([bytes]) => bytes).sort((a, b) => b[0] - a[0]);
  tip.innerHTML = `<div id="tip">${bar ? `<b>${bar}</b>` : ""}<code>${html(line)}</code>${k >= 0 ? `<code>${html(f.lines[k])}</code>` : ""}` +
    `<div class="what">${duration(seconds)} · ${phase.name} line ${at} · ${module ?? phase.buckets[at] ?? ""}</div>` +
    `<div class="what">${held.slice(0, 4).map(([bytes, kind]) => `${kind.replace("_", " ")} ${size(bytes)}`).join(" · ")}</div></div>`;
  const { offsetWidth: w, offsetHeight: h } = tip.firstChild;
  tip.firstChild.style.left = `${Math.min(event.clientX + 14, innerWidth - w - 8)}px`;
  tip.firstChild.style.top = `${event.clientY + 20 + h > innerHeight ? event.clientY - h - 12 : event.clientY + 20}px`;
}
if (track) {
  document.body.append(tip);
  for (const title of $$("rect > title", track)) { // shown as our own hint, without delay
    title.parentNode.dataset.title = title.innerHTML;
    title.remove();
  }
  drawTicks();
  addEventListener("resize", drawTicks);
  track.addEventListener("pointermove", hint);
  track.addEventListener("pointerleave", () => { tip.innerHTML = ""; place(pointer, -1); });
  track.addEventListener("click", (event) => {
    const { phase, at } = under(event);
    goTo(event.target.closest("[data-at]")?.dataset.at ?? `${phase.name}:${at}`);
  });
  scroller.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = scroller.getBoundingClientRect();
    setZoom(zoom * (event.deltaY < 0 ? 1.25 : 0.8), (event.clientX - box.left) / box.width);
  }, { passive: false });
  scroller.addEventListener("scroll", () => { if (zoom > 40) drawTicks(); });
}
