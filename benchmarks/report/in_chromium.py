"""Loads a page in Chromium, for the benchmark beside it, in an environment with selenium and without torch.

It prints the times as JSON.
"""

import json
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.chromium import browser, look, missing

NUM_MOVES = 200


def shown(page: Path) -> dict:
    """Loads a page in Chromium, once to warm up and five times; returns medians of milliseconds."""
    loads = []
    with browser() as driver:
        look(driver, width=1280, dark=False)
        for number in range(6):
            driver.get(page.as_uri())
            driver.execute_async_script(
                "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"
            )
            timing = driver.execute_script(
                "const t = performance.getEntriesByType('navigation')[0];"
                "return {load_ms: t.loadEventEnd, parsed_ms: t.domInteractive};"
            )
            paints = driver.execute_script("return performance.getEntriesByType('paint').map((p) => p.startTime)")
            if number:
                loads.append({**timing, "painted_ms": max(paints, default=0.0)})
        moves = driver.execute_script(
            """
            const box = document.querySelector(".chart"), edge = box.getBoundingClientRect(), times = [];
            for (let n = 0; n < arguments[0]; n++) {
              const start = performance.now(), x = edge.left + edge.width * n / arguments[0];
              box.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: edge.top + 60, bubbles: true}));
              document.body.offsetHeight;
              times.push(performance.now() - start);
            }
            return times.sort((a, b) => a - b);
            """,
            NUM_MOVES,
        )
        nodes = driver.execute_script("return document.querySelectorAll('*').length")
        version = driver.capabilities["browserVersion"]
    found = {key: median(load[key] for load in loads) for key in loads[0]}
    return {**found, "pointer_ms_median": median(moves), "pointer_ms_most": moves[-1], "nodes": nodes,
            "chromium": version, "loads": loads}  # fmt: skip


sys.exit(missing()) if missing() else print(json.dumps(shown(Path(sys.argv[1]).resolve())))
