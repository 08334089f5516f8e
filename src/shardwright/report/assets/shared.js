/* What the scripts of all pages use: numbers as text, round steps of an axis, and the box that follows the pointer. */
const tip = document.getElementById("tip"), live = document.getElementById("live");

const UNITS = [["h", 3600], ["min", 60], ["s", 1], ["ms", 1e-3], ["\u00b5s", 1e-6], ["ns", 1e-9]];
function spell(seconds) {
  if (!seconds) return "0 s";
  if (seconds >= 59.95) {
    const all = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    if (all < 3600) return `${Math.floor(all / 60)} min ${two(all % 60)} s`;
    return `${Math.floor(all / 3600)} h ${two(Math.floor(all % 3600 / 60))} min`;
  }
  const [name, size] = UNITS.slice(2).find((unit) => seconds >= 0.9995 * unit[1]) || UNITS[5];
  return `${(seconds / size).toPrecision(3)} ${name}`;
}
function bytes(count) {
  const found = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find((u) => count >= u[1]);
  return found ? `${(count / found[1]).toFixed(1)} ${found[0]}` : `${count} B`;
}
function stepOf(length, most) {
  const rough = length / most, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((part) => power * part >= rough * (1 - 1e-9));
}
function count(value) {
  const found = [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]].find((u) => Math.abs(value) >= u[1]);
  return found ? `${(value / found[1]).toFixed(1)} ${found[0]}` : String(+value.toPrecision(4));
}
const plain = (value) => Math.abs(value) >= 1e6 || (value && Math.abs(value) < 1e-4)
  ? value.toExponential(3) : (+value.toPrecision(5)).toLocaleString("en", {maximumFractionDigits: 12});
const whole = (value) => Math.round(value).toLocaleString("en");

function show(what, x, y) {
  tip.replaceChildren();
  const title = document.createElement("b");
  title.textContent = what.title;
  tip.append(title);
  for (const pair of what.rows) {
    const line = document.createElement("div");
    for (const words of pair) {
      const cell = document.createElement("span");
      cell.textContent = words;
      line.append(cell);
    }
    tip.append(line);
  }
  tip.style.display = "block";
  const width = tip.offsetWidth, height = tip.offsetHeight;
  tip.style.left = `${Math.max(4, x + 18 + width > innerWidth ? x - width - 14 : x + 18)}px`;
  tip.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 6))}px`;
}
