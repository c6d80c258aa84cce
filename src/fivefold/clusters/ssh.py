"""Writes a script that starts torchrun by ssh: for a handful of machines. It ends all of them together.

They are tied together by standard input: the script holds a pipe open that every ssh reads, and where the input ends
the host tells its ranks to save and stop. So no ranks are left behind when a host fails, or when the script is
interrupted or killed.
"""

import re
from pathlib import Path

from fivefold.clusters.deployment import Deployment
from fivefold.clusters.environment import export_lines, rank_variables
from fivefold.clusters.quoting import comment_lines, fill_template, quote, quote_path
from fivefold.clusters.torchrun import PORT, shutdown_timeout, threads_per_rank, torchrun_command
from fivefold.support.errors import Problem, UserError
from fivefold.support.files import read_regular
from fivefold.support.parsing import parsing, path_of

_HOST = re.compile(r"(?:[A-Za-z_][\w.-]*@)?[A-Za-z0-9][\w.-]*", re.ASCII)  # never an option of ssh
_MAX_SIZE = 1 << 20  # bytes of a hosts file

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
watch=$!
wait "$agent"
code=$?
kill "$watch"  # else it would send that signal to whoever gets the number next
exit "$code"
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
exec 9<> "$hold/open"  # which waits for nobody
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
    """Read a file with [USER@]NAME on each line; # begins a comment."""
    try:
        with parsing(file, "a list of hosts"):
            text = read_regular(path_of(file), _MAX_SIZE, links=True).decode()
    except OSError as error:
        raise UserError(f"cannot read the hosts file {file}: {error.strerror or error}", "file.read") from None
    problems, hosts, form = [], dict[str, int](), "write NAME or USER@NAME, one on each line"
    for number, line in enumerate(text.splitlines(), 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        if not _HOST.fullmatch(host):
            problems.append(Problem("hosts.name", f"{file}, line {number}: {host!r} is not a host; {form}"))
        elif host in hosts:
            twice = f"{file}, line {number}: {host} is in line {hosts[host]} already"
            problems.append(Problem("hosts.twice", twice))
        hosts.setdefault(host, number)
    if not hosts:
        problems.append(Problem("hosts.empty", f"{file} names no host; {form}"))
    if problems:
        raise UserError(problems)
    return list(hosts)


def ssh_script(deployment: Deployment, hosts: list[str], restarts: int) -> str:
    """The script that starts torchrun on all hosts by ssh."""
    first = hosts[0].rpartition("@")[2]
    agent = torchrun_command(deployment, f"{first}:{PORT}", '"$1"', restarts, ',is_host="$4"')
    threads = threads_per_rank(deployment.machines)
    variables = [
        *rank_variables(deployment.machines, threads, "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$PWD"),
        shutdown_timeout(deployment),
    ]
    return fill_template(
        _SCRIPT.lstrip(),
        {
            "TITLE": comment_lines(f"{deployment.title}.")
            + comment_lines(
                "Run it on a machine that shares this directory with the hosts, under the same path, and whose shell "
                "knows `fivefold`. SSH='ssh -F FILE' uses another configuration."
            ),
            "HOSTS": " ".join(map(quote, hosts)),
            "NAME": quote(deployment.safe_name),
            "LOGS": quote_path(deployment.log_directory),
            "EXPORTS": export_lines(variables),
            "AGENT": [" \\\n  ".join([*agent[:-1], f"{agent[-1]} < /dev/null &"])],
            "LAST": deployment.save_notice,
        },
    )
