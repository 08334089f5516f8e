/* Charts of values by step, drawn as SVG: a cursor that the pointer or the arrow keys move tells the values of a step. */
const SPELLED = {bytes, count, plain, ms: (value) => spell(value / 1000)};
const charts = [];

function firstFrom(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = low + high >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low;
}
function niceTicks(low, high, most, isBytes) {
  if (!(high > low)) return [low];
  const unit = isBytes ? 2 ** (10 * Math.floor(Math.log2(Math.max(high, 1)) / 10)) : 1;
  const step = unit * stepOf((high - low) / unit, most), found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(n * step);
  return found;
}
function decades(low, high) {
  const found = [], parts = high / low > 1e4 ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const part of parts) if (part * 10 ** power >= low && part * 10 ** power <= high) found.push(part * 10 ** power);
  return found;
}
/* The words for the steps that a point stands for. */
function stepWords(steps, index) {
  const first = index ? steps[index - 1] + 1 : steps[0], few = steps.length > 1 && steps[1] - steps[0] > 1;
  return few && index ? `steps ${whole(first)} to ${whole(steps[index])}` : `step ${whole(steps[index])}`;
}

function startChart(figure) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const box = figure.querySelector(".chart"), svg = box.querySelector("svg"), spelled = SPELLED[chart.unit];
  const off = new Set();
  let place = null, steps = [];
  const shown = () => chart.curves.filter((_, n) => !off.has(n));
  const node = (name, attributes, words) => {
    const made = document.createElementNS(svg.namespaceURI, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (words !== undefined) made.textContent = words;
    return made;
  };

  function draw() {
    const width = box.clientWidth, height = box.clientHeight;
    if (!width) return;
    const curves = shown().filter((curve) => curve.steps.length), all = chart.curves.filter((c) => c.steps.length);
    const known = (values) => values.filter((value) => value !== null);
    const low = Math.min(...curves.map((c) => Math.min(...(c.low.length ? c.low : known(c.values)))));
    const high = Math.max(...curves.map((c) => Math.max(...(c.high.length ? c.high : known(c.values)))));
    const first = Math.min(...all.map((c) => c.steps[0])), last = Math.max(...all.map((c) => c.steps[c.steps.length - 1]));
    steps = [...new Set(curves.flatMap((c) => c.steps))].sort((a, b) => a - b);
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    if (!curves.length) { place = null; return; }
    const log = chart.log && low > 0, scaled = log ? Math.log10 : (value) => value;
    let bottom = scaled(low), top = scaled(high);
    if (!log && chart.zero) bottom = Math.min(0, bottom);
    const room = (top - bottom || Math.abs(top) || 1) * 0.06;
    top += room;
    if (log || !chart.zero || bottom < 0) bottom -= room;
    const marks = chart.marks.length ? 18 : 6, under = height - 24;
    const ticks = log ? decades(10 ** bottom, 10 ** top)
      : niceTicks(bottom, top, Math.max(3, Math.floor(height / 55)), chart.unit === "bytes");
    const left = Math.min(90, Math.max(42, 14 + 7 * Math.max(...ticks.map((tick) => spelled(tick).length))));
    const right = width - 10;
    const x = (step) => left + (last > first ? (step - first) / (last - first) : 0.5) * (right - left);
    const y = (value) => under - (scaled(value) - bottom) / (top - bottom) * (under - marks);
    for (const tick of ticks) {
      svg.append(node("line", {class: "rule", x1: left, x2: right, y1: y(tick), y2: y(tick)}));
      svg.append(node("text", {class: "tick", x: left - 8, y: y(tick) + 4, "text-anchor": "end"}, spelled(tick)));
    }
    const most = Math.max(2, Math.floor((right - left) / 90));
    for (const tick of niceTicks(first, last, most).filter((each) => Number.isInteger(each))) {
      const anchor = x(tick) > right - 20 ? "end" : x(tick) < left + 12 ? "start" : "middle";
      svg.append(node("text", {class: "tick", x: x(tick), y: height - 6, "text-anchor": anchor}, whole(tick)));
    }
    svg.append(node("text", {class: "tick", x: left - 8, y: height - 6, "text-anchor": "end"}, "step"));
    svg.append(node("line", {class: "axis", x1: left, x2: right, y1: under, y2: under}));
    chart.marks.forEach(([step, words], n) => {
      if (step < first || step > last) return;
      const at = x(step), next = n + 1 < chart.marks.length ? x(chart.marks[n + 1][0]) : right;
      svg.append(node("line", {class: "resume", x1: at, x2: at, y1: 4, y2: under}));
      const letters = Math.floor((next - at - 10) / 6.6), label = `\u21bb ${words}`;
      if (letters > 3) svg.append(node("text", {class: "tick", x: at + 4, y: 12},
        label.length <= letters ? label : `${label.slice(0, letters - 1)}\u2026`));
    });
    if (chart.level && scaled(chart.level[0]) < top && scaled(chart.level[0]) > bottom) {
      const at = y(chart.level[0]);
      svg.append(node("line", {class: "level", x1: left, x2: right, y1: at, y2: at}));
      svg.append(node("text", {class: "tick", x: right, y: at - 5, "text-anchor": "end"}, chart.level[1]));
    }
    const paths = chart.curves.map((curve, n) => {
      if (off.has(n) || !curve.steps.length) return null;
      const group = node("g", {class: `curve c${curve.colour % 8} ${curve.style}`}), size = curve.steps.length;
      const line = (values, steps) => values.map((value, i) => value === null ? ""
        : `${i && values[i - 1] !== null ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
      if (curve.low.length) {
        const back = line([...curve.low].reverse(), [...curve.steps].reverse()).replace("M", "L");
        group.append(node("path", {class: "band", d: `${line(curve.high, curve.steps)}${back}Z`}));
      }
      const extra = chart.compared ? 2.5 * (chart.curves.length - 1 - n) / chart.curves.length : 0;
      group.append(node("path", {class: "line", d: line(curve.values, curve.steps), "stroke-width": 1.8 + extra}));
      if (size === 1 || curve.style === "points" && size <= 60) curve.steps.forEach((step, i) =>
        group.append(node("circle", {cx: x(step), cy: y(curve.values[i]), r: 3.2})));
      return group;
    });
    svg.append(...paths.filter(Boolean));
    const cursor = node("g", {class: "cursor"});
    svg.append(cursor);
    Object.assign(here, {x, y, left, right, first, last, cursor, under, top: marks});
  }
  const here = {};

  /* Of each curve the value at a step: that of the first point from there on, which stands for the steps before it. */
  function at(step) {
    return chart.curves.flatMap((curve, n) => {
      if (off.has(n) || !curve.steps.length) return [];
      const index = firstFrom(curve.steps, step);
      if (index >= curve.steps.length || step < curve.steps[0] && index === 0) return [];
      if (curve.style === "points" && curve.steps[index] !== step || curve.values[index] === null) return [];
      return [{curve, index}];
    });
  }
  function words(found) {
    return found.map(({curve, index}) => {
      const range = curve.low.length && curve.low[index] < curve.high[index]
        ? ` (${spelled(curve.low[index])} to ${spelled(curve.high[index])})` : "";
      return [curve.name, `${spelled(curve.values[index])}${range}`];
    });
  }
  function point(step, isOwn) {
    if (!here.cursor) return;
    here.cursor.replaceChildren();
    if (step === null || step < here.first || step > here.last) return;
    const at_x = here.x(step);
    here.cursor.append(node("line", {x1: at_x, x2: at_x, y1: here.top, y2: here.under}));
    if (isOwn) for (const {curve, index} of at(step)) here.cursor.append(node("circle",
      {class: `c${curve.colour % 8}`, cx: here.x(curve.steps[index]), cy: here.y(curve.values[index]), r: 4}));
  }
  function choose(index, x, y) {
    if (!steps.length) return;
    place = Math.max(0, Math.min(index, steps.length - 1));
    const step = steps[place], found = at(step), rows = words(found);
    const title = found.length ? stepWords(found[0].curve.steps, found[0].index) : `step ${whole(step)}`;
    box.setAttribute("aria-valuenow", step);
    box.setAttribute("aria-valuetext", `${title}: ${rows.map((row) => row.join(" ")).join(", ")}`);
    charts.forEach((other) => other.point(step, other === own));
    const edge = box.getBoundingClientRect();
    show({title, rows}, x === undefined ? edge.left + here.x(step) : x, y === undefined ? edge.top + 20 : y);
  }
  function leave() {
    tip.style.display = "none";
    charts.forEach((other) => other.point(null));
  }
  const own = {point};
  charts.push(own);

  for (const name of ["pointermove", "pointerdown"]) box.addEventListener(name, (event) => {
    if (!here.x || !steps.length) return;
    const part = (event.clientX - box.getBoundingClientRect().left - here.left) / (here.right - here.left);
    const wanted = here.first + Math.max(0, Math.min(1, part)) * (here.last - here.first);
    const next = Math.min(firstFrom(steps, wanted), steps.length - 1);
    const index = next && wanted - steps[next - 1] < steps[next] - wanted ? next - 1 : next;
    choose(index, event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", leave);
  box.addEventListener("blur", leave);
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = Math.max(1, Math.round(steps.length / 10)), start = place === null ? -1 : place;
    const to = {ArrowRight: start + 1, ArrowUp: start + 1, ArrowLeft: start - 1, ArrowDown: start - 1,
      PageUp: start + far, PageDown: start - far, Home: 0, End: steps.length - 1}[event.key];
    if (event.key === "Escape") leave();
    else if (to !== undefined) choose(to);
    else return;
    event.preventDefault();
  });
  figure.querySelectorAll(".legend button").forEach((button, n) => button.addEventListener("click", () => {
    if (off.has(n)) off.delete(n); else off.add(n);
    button.setAttribute("aria-pressed", String(!off.has(n)));
    draw();
  }));
  new ResizeObserver(draw).observe(box);
}

/* A map of memory: a line for each rank, a column for some steps, shades for bytes. */
function startMap(figure) {
  const map = JSON.parse(figure.querySelector("script").textContent), box = figure.querySelector(".map");
  const canvas = box.querySelector("canvas"), mark = box.querySelector("i"), lines = map.cells.length;
  let line = 0, column = -1;
  function draw() {
    if (!box.clientWidth) return;
    const ends = ["--least", "--most"].map((name) =>
      getComputedStyle(document.documentElement).getPropertyValue(name).trim().split(" ").map(Number));
    canvas.width = map.steps.length;
    canvas.height = lines;
    const g = canvas.getContext("2d"), image = g.createImageData(canvas.width, lines);
    map.cells.forEach((text, r) => [...text].forEach((letter, c) => {
      const part = (letter.charCodeAt(0) - 48) / 63, i = 4 * (r * canvas.width + c);
      for (let n = 0; n < 3; n++) image.data[i + n] = (1 - part) * ends[0][n] + part * ends[1][n];
      image.data[i + 3] = letter === " " ? 0 : 255;
    }));
    g.putImageData(image, 0, 0);
  }
  function choose(r, c, x, y) {
    line = Math.max(0, Math.min(r, lines - 1));
    column = Math.max(0, Math.min(c, map.steps.length - 1));
    const letter = map.cells[line][column], first = line * map.ranks_in_line;
    const held = map.least_bytes + (letter.charCodeAt(0) - 48) / 63 * (map.most_bytes - map.least_bytes);
    const who = map.ranks_in_line > 1 ? `ranks ${first} to ${first + map.ranks_in_line - 1}` : `rank ${first}`;
    const rows = [[who, letter === " " ? "not there" : `about ${bytes(held)}`]], title = stepWords(map.steps, column);
    box.setAttribute("aria-valuenow", map.steps[column]);
    box.setAttribute("aria-valuetext", `${title}: ${rows[0].join(" ")}`);
    const wide = box.clientWidth / map.steps.length, high = box.clientHeight / lines, edge = box.getBoundingClientRect();
    Object.assign(mark.style, {display: "block", left: `${column * wide}px`, top: `${line * high}px`,
      width: `${Math.max(wide, 4)}px`, height: `${Math.max(high, 4)}px`});
    show({title, rows}, x === undefined ? edge.left + (column + 1) * wide : x,
      y === undefined ? edge.top + line * high : y);
  }
  function leave() { tip.style.display = mark.style.display = "none"; }
  for (const name of ["pointermove", "pointerdown"]) box.addEventListener(name, (event) => {
    const edge = box.getBoundingClientRect();
    choose(Math.floor((event.clientY - edge.top) / edge.height * lines),
      Math.floor((event.clientX - edge.left) / edge.width * map.steps.length), event.clientX, event.clientY);
  });
  box.addEventListener("pointerleave", leave);
  box.addEventListener("blur", leave);
  box.addEventListener("keydown", (event) => {
    const to = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], PageDown: [16, 0],
      PageUp: [-16, 0], Home: [0, -1e6], End: [0, 1e6]}[event.key];
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") leave();
    else if (to) choose(line + to[0], column + to[1]);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(box);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
document.querySelectorAll("figure.of-chart").forEach(startChart);
document.querySelectorAll("figure.of-map").forEach(startMap);
