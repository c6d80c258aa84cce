"""A handful of machines that ssh reaches: a script that starts torchrun on each, and ends all of them together.

What ties them is standard input. The script holds a pipe open that every ssh reads, and a host on which it ends tells
its ranks to save and stop. So a script that has seen a host fail, is interrupted or is killed leaves no ranks behind.
"""

import re
from pathlib import Path

from fivefold.deploy.deployment import Deployment
from fivefold.deploy.environment import exports, variables
from fivefold.deploy.shell import comment, path, word
from fivefold.deploy.slurm import filled
from fivefold.deploy.torchrun import PORT, saving, threads, words
from fivefold.support.documents import parsing, path_of
from fivefold.support.errors import UserError
from fivefold.support.files import read_regular

_HOST = re.compile(r"(?:[A-Za-z_][\w.-]*@)?[A-Za-z0-9][\w.-]*", re.ASCII)  # and no option of ssh's
_LARGEST = 1 << 20  # bytes of a hosts file

_SCRIPT = r"""
#!/bin/bash
@TITLE@
set -u
hosts=(@HOSTS@)
ssh=(${SSH:-ssh} -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=30 -o ServerAliveCountMax=4)
run=@NAME@-$(date +%Y%m%d-%H%M%S)
logs=@LOGS@/ssh-$run
mkdir -p -- "$logs" || exit 2

# What each host runs: $1 is the run, $2 and $3 are this shell's directory and PATH, $4 is 1 on the first host. When its
# input ends, with this script or with the network, the ranks are told to save and stop.
read -r -d '' remote << 'END'
cd "$2" || exit 2
export PATH="$3"
@EXPORTS@
@AGENT@
agent=$!
(while read -r _; do :; done; kill -TERM "$agent") <&0 > /dev/null 2>&1 &
wait "$agent"
END
quote() { printf "'%s'" "${1//\'/\'\\\'\'}"; }  # as every login shell reads it

hold=$(mktemp --directory)
trap 'rm -r "$hold"' EXIT
mkfifo "$hold/open"
pids=() first=1
for host in "${hosts[@]}"; do
  command="bash -c $(quote "$remote") fivefold $(quote "$run") $(quote "$PWD") $(quote "$PATH") $first"
  (
    "${ssh[@]}" -- "$host" "$command" < "$hold/open" > "$logs/$host.log" 2>&1
    code=$?
    echo "$host ended with code $code at $(date -Is)"
    [ "$code" -eq 0 ] || kill -USR1 $$
    exit "$code"
  ) &
  pids+=($!) first=0
done

# Hosts that have not saved in time are left to ssh's end.
stop() {
  [ -z "${timer:-}" ] || return
  echo "$1: all hosts save and stop"
  exec 9>&-
  (sleep @LAST@ && kill "${pids[@]}") 2> /dev/null & timer=$!
}
trap 'stop "a host has failed"' USR1
trap 'stop "interrupted"' INT TERM HUP
exec 9> "$hold/open"
echo "run $run on ${#hosts[@]} hosts; each writes to $logs/HOST.log"

# By looking once a second: bash may lose the code of a process that ends while a signal interrupts `wait`. 143 is that
# of hosts that were told to stop, and explains nothing.
failed=0
for pid in "${pids[@]}"; do
  while kill -0 "$pid" 2> /dev/null; do sleep 1; done
  wait "$pid"
  code=$?
  case $failed in 0 | 143) [ "$code" -eq 0 ] || failed=$code ;; esac
done
[ -z "${timer:-}" ] || pkill --parent "$timer"
exit "$failed"
"""


def read_hosts(file: str | Path) -> list[str]:
    """[USER@]NAME on each line; # begins a comment."""
    try:
        with parsing(file, "a list of hosts"):
            text = read_regular(path_of(file), _LARGEST, links=True).decode()
    except OSError as error:
        raise UserError(f"cannot read the hosts file {file}: {error.strerror or error}") from None
    problems, hosts = [], dict[str, int]()
    for number, line in enumerate(text.splitlines(), 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        if not _HOST.fullmatch(host):
            problems.append(f"{file}, line {number}: {host!r} is no host; write NAME or USER@NAME, one on each line")
        elif host in hosts:
            problems.append(f"{file}, line {number}: {host} is in line {hosts[host]} already")
        hosts.setdefault(host, number)
    if not hosts:
        problems.append(f"{file} names no host; write NAME or USER@NAME, one on each line")
    if problems:
        raise UserError(problems)
    return list(hosts)


def script(it: Deployment, hosts: list[str], restarts: int) -> str:
    first = hosts[0].rpartition("@")[2]
    agent = words(it, f"{first}:{PORT}", '"$1"', restarts, ',is_host="$4"')
    found = [*variables(it.machines, threads(it), "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$PWD"), saving(it)]
    return filled(
        _SCRIPT.lstrip(),
        {
            "TITLE": comment(f"{it.title}.")
            + comment(
                "Run it on a machine that shares this directory with the hosts, under the same path, and whose shell "
                "knows `fivefold`. SSH='ssh -F FILE' uses another configuration."
            ),
            "HOSTS": " ".join(map(word, hosts)),
            "NAME": word(it.plain_name),
            "LOGS": path(it.log_directory),
            "EXPORTS": exports(found),
            "AGENT": [" \\\n  ".join([*agent[:-1], f"{agent[-1]} < /dev/null &"])],
            "LAST": it.notice,
        },
    )
