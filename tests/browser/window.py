"""A page in a browser, and what can be found out about it: its figures, its colours, its names, its focus."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 300_000  # ms, of a busy machine: Accuracy predicts for half a minute of a free core
QUIET = """() => !document.querySelector(':root[data-asking], .busy')
    && document.querySelector('main .view')?.childElementCount > 0"""

AUDIT = (Path(__file__).parent / "audit.js").read_text()
FOCUS = (
    "() => { const { dataset, id, textContent } = document.activeElement; return dataset.testid || id || textContent }"
)


@dataclass
class Window:
    page: Any
    wrong: list[str] = field(default_factory=list)  # what the console complains about
    asked: list[str] = field(default_factory=list)  # addresses

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE)
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def settle(self) -> None:
        """Wait until all that was asked for has come and is drawn."""
        self.page.wait_for_function(QUIET, timeout=PATIENCE)
        self.page.wait_for_load_state("networkidle", timeout=PATIENCE)
        self.page.wait_for_timeout(350)  # what waits for a pause of the user
        self.page.wait_for_load_state("networkidle", timeout=PATIENCE)
        self.page.wait_for_function(QUIET, timeout=PATIENCE)

    def one(self, testid: str) -> Any:
        return self.page.locator(f'[data-testid="{testid}"]')

    def text(self, testid: str) -> str:
        return self.one(testid).inner_text().strip()

    def audit(self, *kinds: str) -> dict[str, list[str]]:
        """What is wrong, by kind: the functions of audit.js."""
        found = {kind: self.page.evaluate(f"{AUDIT}.{kind}()") for kind in kinds}
        return {kind: wrong for kind, wrong in found.items() if wrong}

    def focused(self) -> str:
        """The data-testid, id or text of what has the focus."""
        return str(self.page.evaluate(FOCUS)).strip()
