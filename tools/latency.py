"""How long a move of a slider takes in a browser, from the key to the new picture: python tools/latency.py

The same Chromium as tools/screenshots.py. Each figure is of moves one after the other, with a pause between them; the
clock starts with the slider's event and stops when the browser has painted what the server answered.
"""

import os
import statistics

from screenshots import browser, served

CASES = {
    "llama3-8b on 8 GPUs": "plan?model=llama3-8b&cluster=8xH100&layout=dp=8,zero=3,microbatches=16",
    "llama3-405b on 16,384 GPUs": "plan?model=llama3-405b&cluster=2048x8xH100&batch=2048&seq=8192"
    "&layout=dp=128,tp=8,pp=16,zero=1,sp,microbatches=16",
}
SLIDERS = ("tp", "zero", "microbatches", "cp", "recompute")
MOVES = 6
MOVE = """async name => {
  const input = document.querySelector(`[data-testid="slider-${name}"]`), now = Number(input.value);
  input.value = now < Number(input.max) && now < 5 ? now + 1 : Math.max(0, now - 2);
  const plot = document.querySelector('[data-testid="memory-plot"]'), start = performance.now();
  await new Promise(done => {
    const painted = (_, observer) => { observer.disconnect(); requestAnimationFrame(() => setTimeout(done)); };
    new MutationObserver(painted).observe(plot, { childList: true });
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
  return performance.now() - start;
}"""


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with served() as address, browser() as chrome:
        for name, hash in CASES.items():
            page = chrome.new_page(viewport={"width": 1280, "height": 860})
            page.goto(address)
            page.wait_for_selector("#tabs a")
            page.evaluate("hash => { location.hash = hash }", hash)
            page.wait_for_selector('[data-testid="ranking"]', timeout=60_000)
            page.wait_for_timeout(2000)
            times = []
            for slider in SLIDERS * MOVES:
                times.append(page.evaluate(MOVE, slider))
                page.wait_for_timeout(700)
            low, middle, high = min(times), statistics.median(times), sorted(times)[int(0.9 * len(times))]
            print(
                f"{name}: median {middle:.0f} ms, fastest {low:.0f}, nine of ten below {high:.0f} ({len(times)} moves)"
            )
            page.close()


if __name__ == "__main__":
    main()
