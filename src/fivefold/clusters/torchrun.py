"""Writes the torchrun command, which is the same on every node, and the script that starts it by ssh.

The ranks meet by the c10d rendezvous, which numbers the nodes itself and can therefore restart all of them: an agent
whose ranks fail enters it again, and the other agents follow. (The static rendezvous takes the numbers from the command
and cannot do that.) The host of the rendezvous must stay.
"""

import re
from itertools import chain
from pathlib import Path

from fivefold.clusters.deployment import Deployment, Variable, exports, variables
from fivefold.clusters.quoting import comment, path, word
from fivefold.clusters.slurm import filled
from fivefold.support.errors import Problem, UserError
from fivefold.support.files import read_regular
from fivefold.support.parsing import parsing, path_of

HOST = "FILL_IN_HOST"
PORT = 29400
_JOIN = 3600  # seconds that nodes wait for each other; torchrun's default, 600, is less than some queues take


def saving(it: Deployment) -> Variable:
    """The variable that gives ranks the time to save when torchrun is told to end."""
    why = "torchrun that is told to end gives its ranks so many seconds to save, not 30"
    return Variable("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(it.notice), why)


def joining(it: Deployment) -> list[Variable]:
    """The variable that agents of an elastic run need, so that some can join later."""
    why = (
        "an agent that joins a run would else wait for the address of its store, which torch 2.11 and 2.13 do not tell"
    )
    return [Variable("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1", why)] if it.least else []


def words(it: Deployment, endpoint: str, run: str, restarts: int, conf: str = "") -> list[str]:
    """The words of the command, which the shell expands."""
    machines = it.machines
    return [
        "torchrun",
        f"--nnodes={it.least}:{machines.nodes}" if it.least else f"--nnodes={machines.nodes}",
        f"--nproc-per-node={machines.per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run}",
        f"--rdzv-conf=join_timeout={_JOIN}{conf}",
        f"--max-restarts={restarts}",
        f"-m {it.words()}",
    ]


def lines(it: Deployment, host: str, run: str, restarts: int) -> str:
    """The lines to type on each node."""
    host = host or (HOST if it.machines.nodes > 1 else "localhost")
    for_all_kinds = variables(it.machines, threads(it), "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$PWD")
    text = [
        *comment(f"{it.title}."),
        *chain(*map(comment, _instructions(it, host))),
        *exports([*for_all_kinds, saving(it), *joining(it)]),
        " \\\n  ".join(words(it, f"{host}:{PORT}", run, restarts)),
    ]
    return "\n".join(text) + "\n"


def _instructions(it: Deployment, host: str) -> list[str]:
    """Sentences for the person who types the command."""
    where = f", in the directory that has {it.own_file}" if it.own_file else ""
    comma = "," if where else ""
    if it.machines.nodes == 1:
        return [f"Run this on the node{where}. Its port {PORT} must be free."]
    elastic = (
        f"The run begins with {it.least} nodes, and continues on the remaining ones when others are lost, but for "
        f"{host}, at which they meet. The same line on a node that is back, or another, has it join."
    )
    return [
        f"Run this on each of the {it.machines.nodes} nodes{where}{comma} within an hour; it is the same "
        f"on all. {host} is one of them, by the name or address that the others reach it by, and its port {PORT} is "
        "free. run.dir is a directory that all nodes share.",
        "Ranks prove that they belong together by a secret in run.dir. Where that is not shared, they need one of 16 "
        "characters or more, the same on all nodes: export FIVEFOLD_SECRET=...",
        *([elastic] if it.least else []),
    ]


def threads(it: Deployment) -> str:
    """A shell expression for the number of cores per rank."""
    return f"$(( $(nproc) > {it.machines.per_node} ? $(nproc) / {it.machines.per_node} : 1 ))"


# ---- ssh ------------------------------------------------------------------------------------------------------------
# A handful of machines that ssh reaches: a script that starts torchrun on each, and ends all of them together.
#
# They are tied together by standard input: the script holds a pipe open that every ssh reads, and where the input ends
# the host tells its ranks to save and stop. So no ranks are left behind when a host fails, or when the script is
# interrupted or killed.


_HOST = re.compile(r"(?:[A-Za-z_][\w.-]*@)?[A-Za-z0-9][\w.-]*", re.ASCII)  # never an option of ssh
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
            text = read_regular(path_of(file), _LARGEST, links=True).decode()
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


def ssh_script(it: Deployment, hosts: list[str], restarts: int) -> str:
    """The script that starts torchrun on all hosts by ssh."""
    first = hosts[0].rpartition("@")[2]
    agent = words(it, f"{first}:{PORT}", '"$1"', restarts, ',is_host="$4"')
    chosen = [*variables(it.machines, threads(it), "${TMPDIR:-/tmp}/fivefold-$(id -un)", "$PWD"), saving(it)]
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
            "EXPORTS": exports(chosen),
            "AGENT": [" \\\n  ".join([*agent[:-1], f"{agent[-1]} < /dev/null &"])],
            "LAST": it.notice,
        },
    )
