# Append a line to the cluster's history, also where another does so at the same time. HISTORY is its path; LINE is an
# object of JSON without its time, which is this host's.
umask 027
exec 9>>"$HISTORY" || exit
flock --timeout 10 9  # where the file system knows no locks, a short line is still written as one
[ -z "$(tail -c 1 "$HISTORY")" ] || echo >&9  # a power cut has left half a line
settings=
[ -z "$SETTINGS" ] || settings=$(tr '\n' ' ' <"$SETTINGS")
printf '{"time": %s, %s%s\n' "$(date +%s.%3N)" "${settings:+\"settings\": $settings, }" "${LINE#?}" >&9 && sync "$HISTORY"
