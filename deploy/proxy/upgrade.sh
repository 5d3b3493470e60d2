#!/bin/sh
# Put one instance of ray-hetero@.service in the place of another, without a lost request.
#
#   upgrade.sh BACKEND OLD NEW        such as upgrade.sh chat chat chat-new
#
# NEW has a file of variables of its own, with another PORT.  Requests that come until it serves wait
# in the proxy; where the host has room for both instances, start NEW before, and none waits.
set -eu
test $# = 3 || { echo "expected BACKEND OLD NEW, such as: $0 chat chat chat-new; got $# words" >&2; exit 2; }
backend=$1 old=$2 new=$3
admin=${HAPROXY_ADMIN:-/run/haproxy/admin.sock}
folder=${RAY_HETERO_ENV:-/etc/ray_hetero}
test -r "$folder/$new.env" || { echo "expected $folder/$new.env, as of $old, with another PORT" >&2; exit 1; }
port=$(sed -n 's/^PORT="\{0,1\}\([0-9]*\)"\{0,1\}$/\1/p' "$folder/$new.env")
test -n "$port" || { echo "expected PORT=number in $folder/$new.env" >&2; exit 1; }

said=$(echo "set server $backend/engine addr 127.0.0.1 port $port" | socat - "UNIX-CONNECT:$admin")
case $said in
*"No such"*) echo "expected a backend $backend in haproxy.cfg; HAProxy says: $said" >&2; exit 1 ;;
esac
# What was on its way to OLD is there by then; OLD finishes it before it ends.
sleep 2
systemctl stop "ray-hetero@$old"
systemctl start "ray-hetero@$new"
echo "$backend is served by ray-hetero@$new; enter port $port into haproxy.cfg"
