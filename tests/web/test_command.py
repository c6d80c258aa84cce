"""`fivefold ui` as a command: it prints an address that works, listens on this machine alone, and stops when told."""

import json
import re
import signal
import urllib.request
from pathlib import Path

from tests.commands import start


def test_the_printed_address_works_and_nobody_else_can_reach_it(tmp_path: Path) -> None:
    with start("ui", "--no-browser", "--runs", str(tmp_path), cwd=tmp_path) as command:
        command.until("Ctrl-C")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/#token=([\w-]{40,})\s", command.stdout)
        assert found, command.stdout
        port, token = found.groups()
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/api", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert json.load(answer)["views"][0]["name"] == "plan"
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
        ]
        bound = {words[1] for words in lines if words[3] == "0A" and words[1].endswith(f":{int(port):04X}")}
        assert bound == {f"0100007F:{int(port):04X}"}
        command.send_signal(signal.SIGINT)
        assert command.wait() == 0
        assert command.stderr == ""
