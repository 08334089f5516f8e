/* The interactive pipeline timelines of a page: one call for each group that shares an axis of time. */
function startTimelines(root) {
const data = JSON.parse(root.querySelector("script").textContent);
const LEFT = 78, RIGHT = 10, TOP = 4, AXIS = 26, MEMORY = 100, GAP = 16, FIELDS = 5;
const [KIND, MICROBATCH, CHUNK, START, END] = [0, 1, 2, 3, 4];
const view = {start: 0, end: data.end};
let chosen = null;

const panels = [...root.querySelectorAll(".panel")].map((box) => {
  const timeline = data.timelines[+box.dataset.timeline], rows = timeline.stages.length;
  const row = rows <= 16 ? 30 : Math.max(7, Math.floor(480 / rows));
  const counted = timeline.stages.some((stage) => stage.memory.length);
  const [canvas, cursor, mark] = box.children;
  return {canvas, cursor, mark, timeline, row, counted, bottom: TOP + rows * row, places: null,
    height: TOP + rows * row + (counted ? GAP + MEMORY : 0) + AXIS};
});
const mostBytes = Math.max(1, ...panels.map((panel) => panel.timeline.most));

/* where things are */
const across = (panel) => panel.canvas.clientWidth - LEFT - RIGHT;
const xOf = (panel, time) => LEFT + (time - view.start) / (view.end - view.start) * across(panel);
const timeAt = (panel, x) => view.start + (x - LEFT) / across(panel) * (view.end - view.start);
const field = (stage, index, which) => stage.spans[FIELDS * index + which];
const count = (stage) => stage.spans.length / FIELDS;
function firstAfter(stage, time) {
  let low = 0, high = count(stage);
  while (low < high) {
    const middle = low + high >> 1;
    if (field(stage, middle, END) <= time) low = middle + 1; else high = middle;
  }
  return low;
}
function held(stage, time) {
  let low = 0, high = stage.memory.length / 2;
  while (low < high) {
    const middle = low + high >> 1;
    if (stage.memory[2 * middle] <= time) low = middle + 1; else high = middle;
  }
  return low ? stage.memory[2 * low - 1] : 0;
}
function sameIn(panel, number, key) {
  if (!panel.places) {
    panel.places = new Map();
    panel.timeline.stages.forEach((stage, s) => {
      for (let i = 0; i < count(stage); i++)
        panel.places.set([s, ...stage.spans.slice(FIELDS * i, FIELDS * i + START)].join(), i);
    });
  }
  return panel.places.get([number, ...key].join());
}

/* drawing */
const mixed = (hex, part) =>
  [1, 3, 5].map((at) => Math.round(part * parseInt(hex.slice(at, at + 2), 16) + (1 - part) * 255));
function lineColour(style, place, most) {
  const ends = ["--first", "--last"].map((name) => style.getPropertyValue(name).trim().split(" ").map(Number));
  const part = place / Math.max(most - 1, 1);
  return `rgb(${ends[0].map((first, n) => Math.round((1 - part) * first + part * ends[1][n])).join(" ")})`;
}
function draw(panel) {
  if (!panel.canvas.clientWidth) return;  // inside of details that are closed
  const {canvas, timeline, row, bottom} = panel, ratio = window.devicePixelRatio || 1;
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
  const font = getComputedStyle(document.body).fontFamily, right = LEFT + across(panel);
  canvas.style.height = `${panel.height}px`;
  canvas.width = Math.round(canvas.clientWidth * ratio);
  canvas.height = Math.round(panel.height * ratio);
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.textBaseline = "middle";
  g.font = `13px ${font}`;
  g.textAlign = "right";
  g.fillStyle = colour("--muted");
  const every = Math.ceil(15 / row);
  timeline.stages.forEach((_, s) => {
    if (s % every === 0) g.fillText(`stage ${s}`, LEFT - 10, TOP + (s + 0.5) * row + 1);
  });
  drawAxis(panel, g, colour);
  if (panel.counted) drawMemory(panel, g, style, colour);
  g.save();
  g.beginPath();
  g.rect(LEFT, 0, right - LEFT, bottom);
  g.clip();
  g.textAlign = "center";
  g.font = `12px ${font}`;
  const inset = row < 15 ? 0.5 : 2, idle = colour("--idle");
  timeline.stages.forEach((stage, s) => {
    const top = TOP + s * row + inset, height = row - 2 * inset, first = firstAfter(stage, view.start);
    g.fillStyle = idle;
    g.fillRect(xOf(panel, 0), top, xOf(panel, timeline.makespan) - xOf(panel, 0), height);
    const shades = data.kinds.map((kind) => Object.fromEntries(stage.chunks.map((chunk, place) =>
      [chunk, mixed(kind[2], 1 - 0.6 * place / Math.max(stage.chunks.length - 1, 1))])));
    if (across(panel) < 2 * (firstAfter(stage, view.end) - first)) {
      drawMany(panel, g, s, {shades, ratio, first, idle: mixed(idle, 1), top: Math.round(top * ratio)});
      return;
    }
    for (let i = first; i < count(stage) && field(stage, i, START) < view.end; i++) {
      const from = Math.round(xOf(panel, field(stage, i, START)) * ratio);
      const wide = (Math.round(xOf(panel, field(stage, i, END)) * ratio) - from) / ratio, x = from / ratio;
      if (!wide) continue;
      g.fillStyle = `rgb(${shades[field(stage, i, KIND)][field(stage, i, CHUNK)].join(" ")})`;
      g.fillRect(x, top, wide - (wide > 4 ? 1 : 0), height);
      const words = String(field(stage, i, MICROBATCH));
      if (row >= 15 && wide >= 7.2 * words.length + 4) {
        g.fillStyle = "#1f2933";
        g.fillText(words, (Math.max(x, LEFT) + Math.min(x + wide, right)) / 2, top + height / 2 + 1);
      }
    }
  });
  g.restore();
}
/* Of actions narrower than a pixel or two, each pixel shows the mean colour. */
function drawMany(panel, g, s, {shades, ratio, first, idle, top}) {
  const stage = panel.timeline.stages[s], scale = across(panel) * ratio / (view.end - view.start);
  const wide = Math.round((Math.min(view.end, panel.timeline.makespan) - view.start) * scale);
  const high = Math.round((panel.row - (panel.row < 15 ? 1 : 4)) * ratio), sums = new Float64Array(4 * wide);
  for (let i = first; i < count(stage) && field(stage, i, START) < view.end; i++) {
    const colour = shades[field(stage, i, KIND)][field(stage, i, CHUNK)];
    const from = Math.max(0, (field(stage, i, START) - view.start) * scale);
    const to = Math.min(wide, (field(stage, i, END) - view.start) * scale);
    for (let at = Math.floor(from); at < to; at++) {
      const part = Math.min(to, at + 1) - Math.max(from, at);
      for (let c = 0; c < 3; c++) sums[4 * at + c] += part * (colour[c] - idle[c]);
    }
  }
  if (wide <= 0) return;
  const image = g.createImageData(wide, high);
  for (let at = 0; at < 4 * wide; at++)
    for (let y = 0; y < high; y++) image.data[4 * wide * y + at] = at % 4 === 3 ? 255 : sums[at] + idle[at % 4];
  g.putImageData(image, Math.round(LEFT * ratio), top);
}
function drawAxis(panel, g, colour) {
  const length = view.end - view.start, step = stepOf(length, Math.max(2, Math.floor(across(panel) / 90)));
  const [name, size] = UNITS.find((unit) => view.end >= 2 * unit[1]) || UNITS[5];
  const digits = Math.min(9, Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9)));
  g.textAlign = "center";
  for (let n = Math.ceil(view.start / step - 1e-9); n * step <= view.end * (1 + 1e-9); n++) {
    const x = xOf(panel, n * step);
    g.fillStyle = colour("--rule");
    g.fillRect(x, TOP, 1, panel.height - AXIS);
    g.fillStyle = colour("--muted");
    g.textAlign = x > LEFT + across(panel) - 30 ? "right" : "center";
    g.fillText(`${(n * step / size).toFixed(digits)} ${name}`, x, panel.height - AXIS / 2 + 2);
  }
}
function drawMemory(panel, g, style, colour) {
  const top = panel.bottom + GAP, right = LEFT + across(panel), stages = panel.timeline.stages;
  const y = (count) => top + MEMORY * (1 - count / mostBytes);
  g.textAlign = "right";
  for (const [words, at] of [["0 B", MEMORY], ["memory", MEMORY / 2], [bytes(mostBytes), 0]]) {
    g.fillStyle = colour("--muted");
    g.fillText(words, LEFT - 10, top + at);
    g.fillStyle = colour("--rule");
    g.fillRect(LEFT, top + at, right - LEFT, 1);
  }
  g.save();
  g.beginPath();
  g.rect(LEFT, top - 4, right - LEFT, MEMORY + 8);
  g.clip();
  g.lineWidth = stages.length <= 16 ? 2 : 1;
  for (let s = stages.length - 1; s >= 0; s--) {
    const memory = stages[s].memory;
    if (!memory.length) continue;
    g.beginPath();
    g.moveTo(xOf(panel, memory[0]), y(memory[1]));
    for (let i = 0; i < memory.length; i += 2) {
      if (i) g.lineTo(xOf(panel, memory[i]), y(memory[i - 1]));
      g.lineTo(xOf(panel, memory[i]), y(memory[i + 1]));
    }
    g.lineTo(xOf(panel, panel.timeline.makespan), y(memory[memory.length - 1]));
    g.strokeStyle = lineColour(style, s, stages.length);
    g.stroke();
  }
  g.restore();
}
let waiting = false;
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; panels.forEach(draw); mark(); });
}
/* telling */
const told = (stage, s, i) => [
  ["stage", s], ["chunk", field(stage, i, CHUNK)], ["microbatch", field(stage, i, MICROBATCH)],
  ["start", spell(field(stage, i, START))], ["end", spell(field(stage, i, END))],
  ["duration", spell(field(stage, i, END) - field(stage, i, START))],
];
function about(panel, s, i) {
  const stage = panel.timeline.stages[s], rows = told(stage, s, i);
  const key = stage.spans.slice(FIELDS * i, FIELDS * i + START), own = field(stage, i, END) - field(stage, i, START);
  for (const other of panels) {
    const there = other === panel ? undefined : sameIn(other, s, key);
    if (there === undefined) continue;
    const twin = other.timeline.stages[s], length = field(twin, there, END) - field(twin, there, START);
    rows.push([other.timeline.name, spell(length) + (own ? `, ${(length / own).toFixed(2)} times` : "")]);
  }
  if (stage.memory.length) rows.push(["memory at its end", bytes(held(stage, field(stage, i, END)))]);
  const [letter, words] = data.kinds[field(stage, i, KIND)];
  return {title: `${field(stage, i, CHUNK)}${letter}${field(stage, i, MICROBATCH)}: ${words}`, rows};
}
function aboutWait(panel, s, time) {
  const stage = panel.timeline.stages[s], next = firstAfter(stage, time);
  const from = next ? field(stage, next - 1, END) : 0;
  const to = next < count(stage) ? field(stage, next, START) : panel.timeline.makespan;
  const rows = [["start", spell(from)], ["end", spell(to)], ["duration", spell(to - from)]];
  return {title: `stage ${s} is idle`, rows};
}
function aboutMemory(panel, time) {
  const stages = panel.timeline.stages, step = Math.max(1, Math.ceil(stages.length / 16));
  const rows = stages.flatMap((stage, s) => s % step ? [] : [[`stage ${s}`, bytes(held(stage, time))]]);
  return {title: `memory at ${spell(time)}`, rows};
}
function mark() {
  for (const panel of panels) {
    panel.mark.style.display = "none";
    if (!chosen) continue;
    const stage = panel.timeline.stages[chosen.s];
    const i = panel === chosen.panel ? chosen.i : sameIn(panel, chosen.s, chosen.key);
    if (!stage || i === undefined) continue;
    const left = Math.max(LEFT, xOf(panel, field(stage, i, START)));
    const right = Math.min(LEFT + across(panel), xOf(panel, field(stage, i, END)));
    if (right < left) continue;
    Object.assign(panel.mark.style, {display: "block", left: `${left - 2}px`, top: `${TOP + chosen.s * panel.row}px`,
      width: `${Math.max(4, right - left + 3)}px`, height: `${panel.row}px`});
  }
}
function choose(panel, s, i) {
  const stage = panel && panel.timeline.stages[s];
  chosen = stage ? {panel, s, i, key: stage.spans.slice(FIELDS * i, FIELDS * i + START)} : null;
  mark();
}
function point(time) {
  for (const panel of panels) {
    const x = xOf(panel, time), inside = time !== null && x >= LEFT && x <= LEFT + across(panel);
    Object.assign(panel.cursor.style, {display: inside ? "block" : "none", left: `${x}px`,
      height: `${panel.height - AXIS}px`});
  }
}

/* zooming */
function look(start, end) {
  const length = Math.min(data.end, Math.max(data.end * 1e-6, end - start));
  view.start = Math.max(0, Math.min(start, data.end - length));
  view.end = view.start + length;
  redraw();
}
function zoom(factor, time) {
  look(time - (time - view.start) * factor, time + (view.end - time) * factor);
}
const middle = () => chosen
  ? field(chosen.panel.timeline.stages[chosen.s], chosen.i, START) : (view.start + view.end) / 2;
const TOOLS = {in: () => zoom(0.6, middle()), out: () => zoom(1 / 0.6, middle()), whole: () => look(0, data.end)};
root.querySelectorAll("button[data-tool]").forEach((button) =>
  button.addEventListener("click", TOOLS[button.dataset.tool]));

function step(panel, key) {
  const stages = panel.timeline.stages;
  let {s, i} = chosen && chosen.panel === panel ? chosen : {s: stages.findIndex(count), i: -1};
  if (key === "ArrowRight") i = Math.min(i + 1, count(stages[s]) - 1);
  else if (key === "ArrowLeft") i = Math.max(i - 1, 0);
  else {
    const by = key === "ArrowDown" ? 1 : -1, time = field(stages[s], Math.max(i, 0), START);
    let to = s + by;
    while (stages[to] && !count(stages[to])) to += by;
    if (stages[to]) { s = to; i = Math.min(firstAfter(stages[s], time), count(stages[s]) - 1); }
    else i = Math.max(i, 0);
  }
  choose(panel, s, i);
  const start = field(stages[s], i, START), end = field(stages[s], i, END), length = view.end - view.start;
  if (start < view.start || end > view.end) look(start - length / 2, start + length / 2);
  const what = about(panel, s, i), box = panel.canvas.getBoundingClientRect();
  live.textContent = `${what.title}; ${what.rows.map((row) => row.join(" ")).join(", ")}`;
  show(what, box.left + xOf(panel, end), box.top + TOP + (s + 1) * panel.row);
}

for (const panel of panels) {
  const {canvas, timeline} = panel;
  let from = null;
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    if (from !== null) {
      const by = (from - x) / across(panel) * (view.end - view.start);
      from = x;
      hide();
      look(view.start + by, view.end + by);
      return;
    }
    const time = timeAt(panel, x), s = Math.floor((y - TOP) / panel.row);
    if (x < LEFT || x > LEFT + across(panel) || time < 0 || time > timeline.makespan) return hide();
    point(time);
    if (s >= 0 && s < timeline.stages.length) {
      const i = firstAfter(timeline.stages[s], time);
      const here = i < count(timeline.stages[s]) && field(timeline.stages[s], i, START) <= time;
      choose(here ? panel : null, s, i);
      show(here ? about(panel, s, i) : aboutWait(panel, s, time), event.clientX, event.clientY);
    } else if (panel.counted && y > panel.bottom + GAP / 2 && y < panel.height - AXIS) {
      choose(null);
      show(aboutMemory(panel, time), event.clientX, event.clientY);
    } else hide();
  });
  canvas.addEventListener("pointerdown", (event) => {
    from = event.clientX - canvas.getBoundingClientRect().left;
    canvas.setPointerCapture(event.pointerId);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { from = null; });
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("dblclick", TOOLS.whole);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    hide();
    const length = view.end - view.start;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const by = (event.deltaX || event.deltaY) / across(panel) * length;
      look(view.start + by, view.end + by);
    } else zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) / 400),
      timeAt(panel, event.clientX - canvas.getBoundingClientRect().left));
  }, {passive: false});
  canvas.addEventListener("keydown", (event) => {
    const tool = {"+": "in", "=": "in", "-": "out", "0": "whole", "Home": "whole"}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (tool) TOOLS[tool]();
    else if (event.key.startsWith("Arrow")) step(panel, event.key);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
}
function hide() {
  tip.style.display = "none";
  point(null);
  choose(null);
}
new ResizeObserver(redraw).observe(root);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
}
document.querySelectorAll(".timelines").forEach(startTimelines);
